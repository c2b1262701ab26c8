"""An engine whose in-place decode steps are held to `kernels.in_place_oracle` in every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec, Step
from hybrid_backend.config import HybridConfig, apply_overrides, config_from_mapping, load_mapping, shipped_configs
from hybrid_backend.in_place.step import InPlaceStep
from hybrid_backend.kernels import codes, cpu
from hybrid_backend.kernels.cpu import operations
from hybrid_backend.kernels.digest_format import CODES, MINMAX, MINMAX_AND_INT8
from hybrid_backend.kernels.in_place_oracle import CodeFunctions, InPlaceOracle, InPlaceSettings, Ranking, layer_budgets
from tests.support.harness import Engine
from tests.support.harness import Sequence as Request

OUTPUT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of an output, relative to its largest element: rounding of the output's type, and of fp32 sums."""
INT8_TOLERANCE = 1.6e-2
"""The same of outputs over pages in 8 bits. The oracle rounds decoded keys and values to the model's type, the kernels
do not, and VNNI's round queries and weights to 16 bits."""
SCORE_TOLERANCE = {MINMAX_AND_INT8: 1e-6, CODES: 1e-4, MINMAX: 5e-3}
"""Relative rounding error of a page's score (`InPlaceSettings.score_tolerance`). Products of bytes are exact, sums of
fp32 codes are not, and a query in bf16 rounds its weights for exact maxima and minima."""


def native_codes(isa: str | None) -> CodeFunctions:
    """Digests in codes as the decoder's kernels make and read them, with one instruction set."""

    def encode(pages: Tensor) -> Tensor:
        count, kv_heads, size, dim = pages.shape
        rows = torch.zeros(count, kv_heads, codes.Layout(size, dim).row, dtype=torch.uint8)
        ids = torch.arange(count, dtype=torch.int32)
        operations.extend_digests(pages.transpose(1, 2).flatten(0, 1).contiguous(), rows, ids, 0, size)
        return rows

    def estimates(query: Tensor, rows: Tensor, page_size: int, scale: float) -> Tensor:
        per_head = rows.repeat_interleave(len(query) // rows.shape[1], 1)  # each query head as a KV head
        pages = torch.tensor([len(rows)], dtype=torch.int32)
        scores = operations.page_scores_with(
            isa, query[None], per_head, torch.arange(len(rows), dtype=torch.int32)[None], pages,
            torch.zeros_like(pages), "sum", True, 1.0, scale, page_size,
        )  # fmt: skip
        return scores[0].double()

    return CodeFunctions(encode, estimates)


def shipped(name: str, layers: int | None = None, **keys: object) -> HybridConfig:
    """A shipped configuration, as it is but for ``keys``, of its first ``layers`` layers; None: of all."""
    file = next(file for file in shipped_configs() if file.stem == name)
    mapping = apply_overrides(load_mapping(file), [f"{key}={value}" for key, value in keys.items()])
    if layers is not None:
        for key in ("exact_layers", "budget_factors"):
            values: Sequence[Any] = mapping.get(key, ())  # type: ignore[assignment]
            mapping[key] = list(values[:layers]) if key == "budget_factors" else [x for x in values if x < layers]
        mapping["lookahead"] = {}
    return config_from_mapping(mapping, name)


def model(
    config: HybridConfig, layers: int, dtype: torch.dtype, kv_heads: int, group: int, dim: int,
    windows: tuple[int | None, ...] = (),
) -> ModelSpec:  # fmt: skip
    count, kv_dtype = len(config.budget_factors) or layers, torch.int8 if config.kv_dtype == "int8" else None
    return ModelSpec(count, kv_heads * group, kv_heads, dim, dim**-0.5, dtype, windows, kv_dtype=kv_dtype)


@dataclass(eq=False)
class CheckedEngine(Engine):
    """Runs lives as `Engine` does. Every decoding row of the layers in ``checked`` (None: all) is held to the oracle.

    In each step and layer the native decoder must select a valid choice of pages by the oracle's scores, and its output
    must be attention in fp64 of the pages that it selected. Budgets must be those that the configuration promises.
    """

    isa: str | None = None  # of the decoder and of its kernels for digests in codes; None: the best
    checked: Sequence[int] | None = None
    oracles: dict[tuple[str, int], InPlaceOracle] = field(default_factory=dict)
    rows: int = 0  # that were checked
    sparse_rows: int = 0
    differing_rows: int = 0  # that selected other pages than the oracle, by rounding

    def __post_init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "Decoder", partial(cpu.Decoder, isa=self.isa))
            super().__post_init__()
        executor = self.runtime.executor
        assert isinstance(executor, InPlaceStep)
        self.fused = executor
        forward, release, begin = self.runtime.forward, self.runtime.release, executor._decoder.begin
        self.layer_budgets = torch.empty(0)

        def checked_forward(layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            forward(layer, step, q, k, v, out)
            if self.model.window(layer) is None and (self.checked is None or layer in self.checked):
                self._check_layer(layer, step, q, k, v, out)

        def checked_release(request_ids: Iterable[str]) -> None:
            names = list(request_ids)
            release(names)
            self.oracles = {key: oracle for key, oracle in self.oracles.items() if key[0] not in names}

        def checked_begin(table: Tensor, seq_lens: Tensor, budgets: Tensor, **keys: Any) -> None:
            begin(table, seq_lens, budgets, **keys)
            self.layer_budgets = budgets.expand(self.model.num_layers, -1)

        self.runtime.forward = checked_forward  # type: ignore[method-assign]
        self.runtime.release = checked_release  # type: ignore[method-assign]
        executor._decoder.begin = checked_begin  # type: ignore[method-assign]
        self.selecting = sorted(self.runtime.tiers.digests.layers) if self.runtime.tiers.digests else []
        self.settings = self._settings()

    def _settings(self) -> InPlaceSettings:
        selection, digest = self.cfg.selection, self.runtime.tiers.layout.digests or MINMAX
        return InPlaceSettings(
            heads=self.model.num_heads, scale=self.model.scale, page_size=self.cfg.page_size, sinks=self.cfg.sinks,
            recent=self.cfg.recent, digest=digest, aggregate=selection.aggregate,
            per_head=selection.granularity == "kv_head", bound=selection.bound, candidates=selection.candidates,
            selection_interval=8 if selection.interval == "auto" else selection.interval,
            threads=self.fused._decoder._threads, score_tolerance=SCORE_TOLERANCE[digest],
        )  # fmt: skip

    # --- requests ---

    def add_filled_twin(self, name: str, donor_name: str) -> Request:
        """A request that was preempted and comes back: all its tokens but one lie in pages of another request, which
        fills the last of these pages in the next step."""
        donor, size = self.sequences[donor_name], self.cfg.page_size
        assert donor.tokens % size == size - 1 and donor.tokens >= donor.prompt
        return self.add_twin(name, donor_name, donor.tokens + 1)

    def prefill(self, name: str, chunk: int = 10**6) -> None:
        """Compute the rest of a prompt in chunks, without a look at its outputs."""
        request = self.sequences[name]
        while request.tokens < request.prompt:
            self.step({name: min(chunk, request.prompt - request.tokens)}, tolerance=None)

    # --- checks ---

    def _check_layer(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        rows, decoding = step.decode, [] if step.decode is None else step.decode.request_ids
        spans = {row.request_id: slice(row.start, row.end) for row in step.prefill}
        if rows is not None:
            tokens = zip(decoding, rows.tokens.tolist(), strict=True)
            spans |= {name: slice(token, token + 1) for name, token in tokens}
        # A request that begins with a page which another one fills in this step comes after it.
        for name in sorted(spans, key=lambda name: self.sequences[name].donor is not None):
            oracle = self._oracle(name, layer)
            if name not in decoding:
                oracle.forget_selections()
            oracle.append(*(self._digested(self._stored(layer, x[spans[name]])) for x in (k, v)))
        for r, name in enumerate(decoding):
            self._check_row(name, r, layer, step, q[spans[name]][0], out[spans[name]][0])

    def _digested(self, x: Tensor) -> Tensor:
        """Stored keys or values as digests are made of them: in the model's type, but for codes."""
        return x if self.settings.digest is CODES else x.to(self.model.dtype)

    def _oracle(self, name: str, layer: int) -> InPlaceOracle:
        if (name, layer) not in self.oracles:
            request, sinks = self.sequences[name], self.model.sink(layer)
            oracle = InPlaceOracle(self.settings, layer, sinks, native_codes(self.isa))
            if request.donor is not None:
                keys, values = self.oracles[request.donor.name, layer].written
                oracle.append(keys[: request.tokens], values[: request.tokens])
            elif request.tokens:
                oracle.append(*self._digested(torch.stack(request.kv[layer])).unbind(2))
            self.oracles[name, layer] = oracle
        return self.oracles[name, layer]

    def _check_row(self, name: str, r: int, layer: int, step: Step, query: Tensor, out: Tensor) -> None:
        assert step.decode is not None
        oracle, count = self.oracles[name, layer], step.decode.count
        budget = self._check_budget(name, r, layer) if layer in self.selecting else None
        selection = oracle.decode(query, budget, count)
        selected = [pages.tolist() for pages in self.fused.selected(step.decode, r)]
        place = f"{name}: layer {layer}, {oracle.tokens} tokens, {len(selected[0])} pages selected"
        assert len(selected) == len(selection), place
        for pages, ranking in zip(selected, selection, strict=True):
            assert pages == sorted(pages) and ranking.admits(pages), f"{place}: {_difference(pages, ranking)}"
        expected = oracle.attend(query, selected)
        error = float((out.double() - expected).abs().max() / expected.abs().max())
        tolerance = OUTPUT_TOLERANCE[self.model.dtype] if self.model.kv_dtype is None else INT8_TOLERANCE
        assert error <= tolerance, f"{place}: the output is off by {error}"
        self.rows += 1
        self.sparse_rows += len(selected[0]) * self.cfg.page_size < oracle.tokens
        self.differing_rows += selected != [ranking.chosen.tolist() for ranking in selection]

    def _check_budget(self, name: str, r: int, layer: int) -> int:
        """Pages that the native decoder is told to attend, after comparing them with what the configuration says."""
        config, least = self.cfg, self.cfg.sinks + self.cfg.recent + 1
        tokens = self.oracles[name, layer].tokens
        pages, own_tokens = -(-tokens // config.page_size), self.sequences[name].budget
        budget = int(self.layer_budgets[layer, r])
        mean = max(-(-own_tokens // config.page_size), least) if own_tokens else config.budget_pages
        if mean >= pages:
            assert budget == pages, f"{name}: fits, but layer {layer} attends {budget} of {pages} pages"
            return budget
        factors = [config.budget_factors[i] if config.budget_factors else 1.0 for i in self.selecting]
        expected = layer_budgets(mean, pages, factors, least)[self.selecting.index(layer)]
        assert abs(budget - expected) <= 1, f"{name}: layer {layer} attends {budget} pages instead of {expected}"
        return budget


def _difference(pages: Sequence[int], ranking: Ranking) -> str:
    lacks, wrong = set(ranking.certain.tolist()) - set(pages), set(pages) - set(ranking.possible.tolist())
    return f"{len(pages)} pages of {len(ranking.chosen)}; lacks {sorted(lacks)}, must not have {sorted(wrong)}"
