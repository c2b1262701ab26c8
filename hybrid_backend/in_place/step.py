"""Decode steps of `quest` and `dense` on a CPU: one native call per layer appends, selects and attends host pages.

`kernels.in_place_oracle` is the oracle of what the native decoder selects, at every setting that is shipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.attention.quality import kept_mass
from hybrid_backend.batch import DecodeRows, ModelSpec, Step, whole_tokens
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels import byte_digests, cpu
from hybrid_backend.kernels.digest_format import DigestFormat
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step.budgets import LayerBudgets
from hybrid_backend.step.method import Method, factors_of
from hybrid_backend.step.operations import operations_name
from hybrid_backend.step.quality import watch
from hybrid_backend.tiers import Tiers
from hybrid_backend.workers import kernel_name


class _Rewritten(NamedTuple):
    """Host pages ``[n]`` int64 whose digests a step computes from their first ``tokens`` ``[n]`` int64 keys."""

    pages: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class _Plan:
    dense_tokens: int
    dense_pages: int
    unattended_pages: list[int]  # per layer: pages that the rows do not attend if the layer selects
    selecting: Tensor  # [rows] bool: rows that attend fewer pages than they have
    rewritten: _Rewritten | None  # None: the decoder stores the tokens and adds them to digests


def span_bytes(model: ModelSpec, pages: int, layers: int) -> int:
    """Return the largest memory of the second level of digests of a sequence of ``pages`` pages.

    Every 8 whole pages have byte digests, in arrays that double when they grow (kernels/cpu/src/digest.h,
    `SpanDigests`).
    """
    spans = max(0, pages - 1) // 8
    return (
        layers
        * byte_digests.page_row(model.num_kv_heads, model.head_dim)
        * (2 ** (spans - 1).bit_length() if spans else 0)
    )


def kept_bytes(config: HybridConfig, model: ModelSpec, digest_format: DigestFormat, pages: int, layers: int) -> int:
    """Return the most bytes that a sequence of ``pages`` pages needs to remember candidates (`selection.interval`).

    A page takes four bytes, in arrays that double when they grow.
    """
    lists = model.num_kv_heads if config.selection.granularity == "kv_head" else 1
    return 8 * digest_format.shortlists * lists * pages * layers if config.selection.steps_between_looks > 1 else 0


def why_not_in_place(config: HybridConfig, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> str:
    """Return the reason why the native decoder cannot attend pages in place; an empty string if it can.

    Whether this machine runs the native kernels matters for ``auto`` only: where they are asked for, their absence is
    an error of its own (`operations.check_this_machine`), and a plan may be made for another machine.

    Args:
        config: the keys ``workers.kernel``, ``device_kernels`` and ``page_size`` are read.
        heads: query heads of the attention layers on one rank.
        kv_heads: KV heads of the same layers.
        head_dim: size of a head.
        device: device tier.
    """
    if device.type != "cpu":
        return "the device tier is a GPU"
    if config.workers.kernel == "auto" and (reason := cpu.why_unavailable()):
        return reason
    if not cpu.decodes(heads, kv_heads, head_dim, config.page_size):
        return f"the native kernels have none for {heads} query heads on {kv_heads} KV heads of {head_dim}"
    if kernel_name(config.workers.kernel) != "native":
        return f"workers.kernel is {config.workers.kernel}"
    if operations_name(config, device) != "native":
        return f"device_kernels is {config.device_kernels}"
    return ""


class InPlaceStep:
    """All decoding rows of a step over host pages in place. Layers without digests are exact."""

    resident_pages = device_bytes = 0
    residency = None  # Pages are attended where they lie.

    def __init__(self, method: Method, config: HybridConfig, model: ModelSpec, tiers: Tiers, stats: Stats) -> None:
        self._method, self._config, self._model, self._tiers, self._stats = method, config, model, tiers, stats
        self._per_head = config.selection.granularity == "kv_head"
        digests, byte_copies = (tiers.digests.layers, tiers.digests.byte_copies) if tiers.digests else ({}, {})
        self._sparse_layers, self._layers = set(digests), len(tiers.host.layers)
        self._sequences: dict[str, int] = {}  # the decoder's name of each request it keeps spans and pages of
        self._queries: list[int] = []  # the decoder's names of single queries of the last step
        self._drafted: set[str] = set()
        """Requests whose last step had drafts, so that the digest of a page may cover tokens that were rejected."""
        self._next_sequence = 0
        self._watch = watch(config, stats, sorted(self._sparse_layers), tiers.host.pages)
        factors = factors_of(type(method), config, digests)
        self._budgets = LayerBudgets(config, factors, range(self._layers)) if factors else None
        layers = [layer if model.window(index) is None else None for index, layer in enumerate(tiers.host.layers)]
        bound = config.selection.bound
        self._decoder = cpu.Decoder(
            layers,
            digests,
            model.num_heads,
            model.scale,
            byte_digests=byte_copies,
            sinks=model.sinks_by_layer,
            bound=bound,
            dtype=model.dtype,
        )

    def begin(self, step: Step) -> None:
        rows, config = step.decode, self._config
        assert rows is not None
        rewritten, sequences = self._drafts(rows)
        rows = step.decode = rows.by_query(config.page_size)
        budgets = self._method.budgets(rows)
        if self._watch is not None:
            budgets = self._watch.budgets(budgets, rows)
        by_layer = budgets if self._budgets is None else self._budgets.of_rows(budgets, rows.num_pages)
        self._decoder.begin(
            rows.page_table,
            rows.seq_lens,
            by_layer,
            sinks=config.sinks,
            recent=config.recent,
            tokens=None if rows.whole_batch else rows.tokens,
            per_head=self._per_head,
            aggregate=config.selection.aggregate,
            sequences=torch.tensor(sequences),
            candidates=config.selection.candidates,
            interval=config.selection.steps_between_looks,
        )
        unattended = (rows.num_pages - by_layer).clamp(min=0).sum(-1).expand(self._layers)
        selecting = budgets < rows.num_pages
        if self._watch is not None:  # Samples of rows with their own budgets would mislead the quality watch.
            selecting &= ~rows.has_own_budget
        step.plan = _Plan(
            dense_tokens=int(rows.seq_lens.sum()),
            dense_pages=int(rows.num_pages.sum()),
            unattended_pages=unattended.tolist(),
            selecting=selecting,
            rewritten=rewritten,
        )

    def _drafts(self, rows: DecodeRows) -> tuple[_Rewritten | None, list[int]]:
        """Return the pages whose digests must be computed from their keys, and the decoder's name of each query.

        The decoder adds a token to the digest of its page, and never takes one back. So where a row has drafts, or had
        some in its last step, the digests of all pages that the step writes are made anew. No page that a step has
        written leaves its request before the next step has written the first token behind those that were accepted.
        """
        for query in self._queries:
            self._decoder.forget(query)
        self._queries.clear()
        if rows.tokens.shape[0] == rows.count and not self._drafted:
            return None, [self._sequence(request_id) for request_id in rows.request_ids]
        counts, page_size = rows.query_start.diff().tolist(), self._config.page_size
        sequences, drafted = list[int](), set[str]()
        for request_id, count in zip(rows.request_ids, counts, strict=True):
            sequence = self._sequence(request_id)
            if count == 1:
                sequences.append(sequence)
                continue
            # The decoder's lists for the sequence name pages as of a step whose tokens may be rejected.
            self._decoder.forget(sequence)
            queries = range(self._next_sequence, self._next_sequence + count)
            self._queries += queries
            sequences += queries
            self._next_sequence += count
            drafted.add(request_id)
        is_rewritten = bool(drafted) or not self._drafted.isdisjoint(rows.request_ids)
        self._drafted = (self._drafted - set(rows.request_ids)) | drafted
        if not is_rewritten:
            return None, sequences
        pages, tokens = list[Tensor](), list[Tensor]()
        for row, (length, count) in enumerate(zip(rows.seq_lens.tolist(), counts, strict=True)):
            columns = torch.arange((length - count) // page_size, -(-length // page_size))
            pages.append(rows.page_table[row, columns])
            tokens.append((length - columns * page_size).clamp(max=page_size))
        return _Rewritten(torch.cat(pages), torch.cat(tokens)), sequences

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        plan: _Plan = step.plan
        began = perf_counter()
        if plan.rewritten is None or layer not in self._sparse_layers:
            self._decoder.layer(layer, q, k, v, out)
        else:
            self._rewrite(layer, step, plan.rewritten, k, v)
            self._decoder.layer(layer, q, None, None, out)
        self._stats.layers[layer].attention_seconds += perf_counter() - began
        is_sparse = layer in self._sparse_layers
        left_out = plan.unattended_pages[layer] if is_sparse else 0  # whole pages: the growing one is always attended
        self._stats.attended(layer, plan.dense_tokens - left_out * self._config.page_size, 0)
        self._stats.looked_up(layer, plan.dense_pages - left_out, plan.dense_pages - left_out)
        if is_sparse and step.decode is not None and self._config.is_sampled(step.number, layer):
            self._sample(layer, step.decode, step.decode.gather(q), plan.selecting.nonzero().flatten(), step.number)

    def _rewrite(self, layer: int, step: Step, rewritten: _Rewritten, k: Tensor, v: Tensor) -> None:
        """Store K and V of the decode rows, and compute the digests of the pages that they are written to."""
        rows, tiers = step.decode, self._tiers
        assert rows is not None and tiers.digests is not None
        k, v = whole_tokens(rows.gather(k)), whole_tokens(rows.gather(v))
        pages, offsets = (x.index_select(0, rows.tokens) for x in (step.write_pages, step.write_offsets))
        tiers.operations.append_tokens(k, v, tiers.host.views[layer], pages, offsets)
        tiers.digests.rebuild(layer, rewritten.pages, rewritten.tokens)

    def abandon(self) -> None:
        """Do nothing, because each call finishes its work."""

    def idle(self) -> None:
        """Do nothing, because no row is kept between steps."""

    def failure(self, step: Step) -> None:
        return None  # `decode` raises

    def layer_input(self, layer: int, step: Step, hidden: Tensor, residual: Tensor | None) -> None:
        """Do nothing, because no row parks."""

    def unfinished(self, step: Step) -> list[str]:
        return []

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        return False

    def lookahead(self, layer: int, step: Step, q: Tensor) -> None:
        raise NotImplementedError("the true query selects")

    def holds(self, request_id: str) -> bool:
        # A request that begins to decode reads digests of all its pages. One of a page that another row fills in this
        # very step is not written yet.
        return request_id in self._sequences

    def release(self, request_id: str) -> None:
        self._drafted.discard(request_id)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._decoder.forget(sequence)

    def count(self) -> None:
        """Do nothing, because `decode` counts."""

    def gauges(self) -> dict[str, float]:
        return {} if self._watch is None else self._watch.gauges()

    @property
    def host_bytes(self) -> int:
        """Host memory of the second level of digests, and of pages that are kept to select among."""
        return self._decoder.span_bytes

    def close(self) -> None:
        self._decoder.close()

    def _sequence(self, request_id: str) -> int:
        if request_id not in self._sequences:
            self._sequences[request_id] = self._next_sequence
            self._next_sequence += 1
        return self._sequences[request_id]

    def selected(self, rows: DecodeRows, r: int) -> list[Tensor]:
        """Logical pages that the last layer selected for a row: one list, or one per KV head."""
        first = self._decoder.selected(r).long()
        if not self._per_head or len(first) == int(rows.num_pages[r]):
            return [first]
        return [self._decoder.selected(r, head).long() for head in range(self._model.num_kv_heads)]

    def _sample(self, layer: int, rows: DecodeRows, q: Tensor, selecting: Tensor, turn: int) -> None:
        """Record the attention mass that one of the selecting rows covers.

        Shares are of the keys; an attention sink, which is always attended, has none.
        """
        if not len(selecting):
            return
        r = int(selecting[turn % len(selecting)])
        chosen = torch.stack(self.selected(rows, r))  # [lists, k]
        pages = rows.page_table[r, : int(rows.num_pages[r])]
        kv, tokens = self._tiers.host.layers[layer], int(rows.seq_lens[r])
        self._stats.layers[layer].saw_mass(kept_mass(q[r], kv, pages, tokens, chosen, self._model.scale))
