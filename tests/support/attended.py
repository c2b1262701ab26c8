"""What a method attended, as it says itself: the one place in the tests that knows where each method keeps it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, Step
from hybrid_backend.in_place.step import InPlaceStep
from hybrid_backend.kernels.operations import Selection
from hybrid_backend.methods.clo import Clo
from hybrid_backend.methods.hgca import Hgca
from hybrid_backend.methods.quest import Quest
from hybrid_backend.methods.scout import Scout
from hybrid_backend.methods.selective import Selective
from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step.driver import StepDriver
from hybrid_backend.step.method import KnowsAttended
from hybrid_backend.step.toolbox import Toolbox


class Attended(NamedTuple):
    """One row of one layer in one step. H KV heads, T tokens of the sequence, the step's own among them."""

    tokens: Tensor  # [H, T] bool
    guessed: Tensor  # [H, T] bool: those whose logits are of the predicted query
    guess: Tensor | None  # [heads, head_dim] the predicted query

    @property
    def is_everything(self) -> bool:
        """Dense attention with the true query."""
        return bool(self.tokens.all()) and not bool(self.guessed.any())


class Witness:
    """Looks on while a runtime decodes; after each `forward` it says what each row attended in that layer.

    Logical pages and token positions only: which host page, slot and offset they are, how many tokens a page holds,
    what was computed where and how it was merged is what the outputs prove.
    """

    def __init__(self, runtime: HybridRuntime) -> None:
        self._runtime = runtime
        self._selected: dict[int, Selection] = {}
        self._predicted: dict[int, Tensor] = {}
        self.sparse_rows = 0  # that left tokens out
        self.guessed_rows = 0  # that the predicted query attended some tokens of
        if isinstance(runtime.executor, StepDriver):
            self._watch(runtime.executor)

    def _watch(self, executor: StepDriver) -> None:
        method = self._runtime.method
        lookahead, attend = method.lookahead, method.attend

        def watched_lookahead(step: Toolbox, layer: int, q: Tensor) -> None:
            lookahead(step, layer, q)
            self._predicted[layer] = q.clone()

        def watched(step: Toolbox, layer: int, q: Tensor) -> Tensor:
            result = attend(step, layer, q)
            if layer in executor.toolbox._selections:
                self._selected[layer] = executor.toolbox._selections[layer][0]
            return result

        method.lookahead, method.attend = watched_lookahead, watched  # type: ignore[method-assign]

    def begin(self) -> None:
        """A step begins."""
        self._selected.clear()
        self._predicted.clear()

    def of(self, layer: int, step: Step, r: int) -> Attended:
        """Decoding row ``r`` in ``layer``, which has just run (a layer with full attention)."""
        assert step.decode is not None
        attended = self._of(layer, step, step.decode, r)
        self.sparse_rows += not bool(attended.tokens.all())
        self.guessed_rows += bool(attended.guessed.any())
        return attended

    def _of(self, layer: int, step: Step, rows: DecodeRows, r: int) -> Attended:
        runtime, method = self._runtime, self._runtime.method
        nothing = torch.zeros(runtime.model.num_kv_heads, int(rows.seq_lens[r]), dtype=torch.bool)
        if isinstance(method, Clo):
            assert isinstance(runtime.executor, StepDriver)
            tokens = None
            if int(method.budgets(rows)[r]) < int(rows.num_pages[r]):
                tokens = method.covered(layer, rows, r)
            return Attended(~nothing if tokens is None else tokens, nothing, None)
        if isinstance(method, Quest):
            assert isinstance(runtime.executor, InPlaceStep)
            return Attended(self._by_pages(runtime.executor.selected(rows, r), nothing), nothing, None)
        if isinstance(method, Selective):
            chosen = self._selected[layer]
            tokens = self._by_pages(_lists(chosen.pages, chosen.pages_listed, r), nothing)
            ahead = isinstance(method, Scout) and method.config.lookahead.partial_query == "predicted"
            if not ahead or layer not in self._predicted or not runtime.tiers.frames.size:
                return Attended(tokens, nothing, None)
            missing = self._by_pages(_lists(chosen.absent, chosen.missing_listed, r), nothing)
            return Attended(tokens, missing, self._predicted[layer][r].cpu())
        if isinstance(method, Hgca) and layer in runtime.tiers.cache.stores:
            request, first = method._running[rows.request_ids[r]]
            pages = torch.arange(int(rows.num_pages[r]))
            # A request that is not judged yet attends its older pages whole.
            whole = method.config.sinks + int(runtime.tiers.cache.whole[request])
            tokens = self._by_pages([pages[(pages < whole) | (pages >= first)]], nothing)
            for head, positions in enumerate(runtime.tiers.cache.positions(layer, request)):
                assert not tokens[head, positions].any(), "a token in the window and in the context cache"
                tokens[head, positions] = True
            return Attended(tokens, nothing, None)
        covered = method.covered(layer, rows, r) if isinstance(method, KnowsAttended) else None
        return Attended(~nothing if covered is None else covered.expand_as(nothing), nothing, None)

    def _by_pages(self, lists: list[Tensor], nothing: Tensor) -> Tensor:
        """Logical pages (one list for all KV heads, or one each; -1 for padding) as tokens."""
        size = self._runtime.config.page_size
        tokens = nothing.clone()
        for head in range(len(tokens)):
            pages = lists[head if len(lists) > 1 else 0].tolist()
            for page in (p for p in pages if p >= 0):
                tokens[head, page * size : (page + 1) * size] = True
        return tokens


def _lists(pages: Tensor, listed: Tensor, r: int) -> list[Tensor]:
    return [pages[r, i, : int(count)].cpu() for i, count in enumerate(listed[r])]
