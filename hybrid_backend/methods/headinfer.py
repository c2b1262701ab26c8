"""Method ``headinfer``: exact head-wise streaming (HeadInfer, arXiv 2502.12574).

All KV lies in host memory and passes through two staging buffers: while one is attended, the next pages are copied into
the other, through all groups of KV heads and layers of a step. A sequence's last page, which grows, is attended where
it lies; so the others can be copied before a layer has its K and V. Prompts stream the same way, chunk by chunk.

Optional (``headinfer.resident_heads``): heads whose KV also stays on the device, for every page of the host pool.
Optional (``headinfer.streaming_heads``): heads that attend the first ``sinks`` and last ``recent`` pages only, as in
DuoAttention (arXiv 2410.10819); this alone is not exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial
from hybrid_backend.attention.prefill import KVBlock, gather_tokens
from hybrid_backend.batch import DecodeRows, ModelSpec, PrefillRow, Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.step.method import Method, OwnMemory, by_layer, named_heads, staging_tokens
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.heads import resident_bytes, store_pages
from hybrid_backend.tiers.stream import Piece, cut, head_pages

if TYPE_CHECKING:
    from hybrid_backend.step import Toolbox

_PIECES = 16
"""Pieces of a layer that a captured graph holds, for each group of heads. What is beyond them is attended where it
lies: a GPU reads it over the bus."""


class _Heads:
    """What becomes of the KV heads of some layers. ``few``: those that attend sinks and recent pages only."""

    def __init__(
        self, resident: tuple[int, ...], few: tuple[int, ...], few_pages: int, kv_heads: int, device: torch.device
    ) -> None:
        """``few_pages``: that those attend, but for the last one."""
        every = range(kv_heads)
        self.resident, self.few = tuple(sorted(resident)), few
        self.whole = tuple(head for head in every if head not in resident + few)
        # Pages that each head streams, at most, but for the last one; the same, and the resident heads, on the device.
        self.limits = [0 if head in resident else few_pages if head in few else 2**30 for head in every]
        self.limit = torch.tensor(self.limits, dtype=torch.int32, device=device)
        self.kept = torch.tensor(self.resident, dtype=torch.int64, device=device)


class _Plan(NamedTuple):
    """What a step attends in the layers of the same heads: a list of head pages for each row and KV head. Ids ``[lists,
    1, n]``, tokens ``[lists, 1]``, int32."""

    in_place: tuple[Tensor, Tensor]  # in the host pool
    resident: tuple[Tensor, Tensor] | None  # in the layer's store
    pieces: list[Piece]  # what passes through the buffers
    along: Tensor  # [n] int32 0, 1, ..: as many as a list may have in a piece


class HeadInfer(Method):
    """All attention on the device, all KV in host memory."""

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        for key in ("resident_heads", "streaming_heads"):
            _by_layer(key, config, num_layers, num_kv_heads)
        if both := [name for name in config.headinfer.resident_heads if name in config.headinfer.streaming_heads]:
            raise ConfigError(f"headinfer.resident_heads: {both[0]} is in headinfer.streaming_heads too; remove one")

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """A buffer holds all heads of the longest context that is not yet cut into groups."""
        return TierLayout(separate=True, staging_tokens=staging_tokens(config, config.headinfer.group_thresholds[0]))

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        step = super().own_memory(config, model, device, pages, max_requests)
        stores = resident_bytes(_resident(config, model), model, config.page_size, pages)
        return OwnMemory(step.device + stores, step.host)

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        super().__init__(config, model, tiers)
        self._layers, kv_heads = tiers.layout.full_layers(model), model.num_kv_heads
        self._few_pages = config.sinks + config.recent - 1  # that a head of few attends, but for the last one
        resident = _resident(config, model)
        few = _by_layer("streaming_heads", config, model.num_layers, kv_heads)
        kinds, self._heads = dict[object, _Heads](), dict[int, _Heads]()
        self._stores = tiers.keep_heads(resident).stores
        for layer in self._layers:
            some = resident.get(layer, ()), few.get(layer, ())
            self._heads[layer] = kinds.setdefault(some, _Heads(*some, self._few_pages, kv_heads, tiers.device))
        self._plans: dict[_Heads, _Plan] = {}  # of the open step
        self._staged: Iterator[Tensor] = iter(())
        self._longest, self._has_prompts = 0, False  # tokens of a sequence of the open step

    def groups(self, tokens: int) -> int:
        """Groups of KV heads for a context of ``tokens`` tokens: 1, then twice as many beyond each threshold."""
        return int(2 ** sum(tokens > threshold for threshold in self.config.headinfer.group_thresholds))

    # --- prompts ---

    def prefill(self, layer: int, row: PrefillRow, q: Tensor, own: Partial) -> Tensor:
        heads, page, tokens = self._heads[layer], self.config.page_size, row.seq_len - len(q)
        used = -(-tokens // page)
        first = min(self.config.sinks, used)
        last = max(first, used - self.config.recent)
        resident: list[KVBlock] = []
        if heads.resident and tokens:
            store = self._stores[layer].flatten(0, 2)
            resident.append(KVBlock(heads.resident, *gather_tokens(store, row.pages, len(heads.resident), 0, tokens)))
        before = chain(
            resident,
            self.tiers.prefix(layer, row.pages, tokens, heads.whole, self.groups(tokens)),
            self.tiers.prefix(layer, row.pages[:first], min(tokens, first * page), heads.few),
            self.tiers.prefix(layer, row.pages[last:used], max(0, tokens - last * page), heads.few),
        )
        return self.tiers.prompts.attend(q, own, before, self.model.sink(layer))

    # --- decoding rows ---

    def budgets(self, rows: DecodeRows) -> Tensor:
        return rows.num_pages

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        self._longest, self._has_prompts = int(rows.seq_lens.max()), not rows.whole_batch
        every, stream, page = self.model.num_kv_heads, self.tiers.stream, self.config.page_size
        tokens, pages, before = int(rows.seq_lens.sum()), int(rows.num_pages.sum()), rows.num_pages - 1
        whole, few = int(before.sum()), int(before.clamp(max=self._few_pages).sum())
        for layer, heads in self._heads.items():
            left_out = len(heads.few) * (whole - few) / every  # pages, mean over the heads
            attended = pages - left_out
            held = attended if stream is None else len(heads.resident) * pages / every
            step.counting.count_tokens(tokens - left_out * page, held, missing_pages=attended - held, layers=[layer])
            if stream is not None:  # as if no graph had too few pieces
                passed = len(heads.whole) * whole + len(heads.few) * few
                stream.copied_bytes += passed * self.tiers.page_bytes // every

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        if layer == self._layers[0]:
            self._plans = {heads: self._plan(step, heads, len(q)) for heads in dict.fromkeys(self._heads.values())}
            self._staged = self._passing(self._layers)
        if self._has_prompts and not step.is_captured:  # their chunks pass through the buffers between two layers
            self._staged = self._passing([layer])
        plan, merge, host = self._plans[self._heads[layer]], self.tiers.operations.merge_partials, self.tiers.host.views
        lists, found = q.view(len(q) * self.model.num_kv_heads, -1, q.shape[2]), None
        if plan.resident is not None:
            found = merge(*step.attend(lists, head_pages(self._stores[layer]), *plan.resident))
        for piece in plan.pieces:
            staged = step.attend(lists, next(self._staged), piece.first + plan.along, piece.tokens)
            found = merge(*staged, extra_partial=found)
        last = step.attend(lists, head_pages(host[layer]), *plan.in_place)
        return step.merge(layer, last, found, q.dtype)

    def abandon(self, step: Step) -> None:
        self._staged = iter(())

    def _passing(self, layers: list[int]) -> Iterator[Tensor]:
        """The staging buffers, as they are filled piece by piece."""
        if self.tiers.stream is None:
            return iter(())
        copy_pages, host = self.tiers.operations.copy_pages, self.tiers.host.views
        return self.tiers.stream.through(
            partial(copy_pages, head_pages(host[layer]), host_pages=piece.pages, frame_ids=piece.places)
            for layer in layers
            for piece in self._plans[self._heads[layer]].pieces
        )

    def _plan(self, step: Toolbox, heads: _Heads, rows: int) -> _Plan:
        """From the step's inputs: a graph makes it whenever it is replayed, for the longest sequences there may be."""
        now, page, every = step.inputs(rows), self.config.page_size, self.model.num_kv_heads
        capacity = 0 if self.tiers.stream is None else self.tiers.stream.capacity
        longest = step.shape.columns * page if step.is_captured else self._longest
        columns = -(-longest // page)
        numbers = partial(torch.arange, dtype=torch.int32, device=self.tiers.device)
        head, lists, along = numbers(every), numbers(rows * every)[:, None], numbers(columns)
        before = (now.num_pages[:, None] - 1).clamp(min=0)  # [rows, 1] pages, but for the last one
        wanted = torch.minimum(before, heads.limit)  # [rows, kv_heads] of them

        def nth_of(lists: Tensor, nth: Tensor) -> Tensor:
            """Head pages of the host pool: sinks, then the last ones of as many as are wanted, then the last one."""
            count, row = wanted.flatten()[lists], lists // every
            pages = nth + (nth >= count.clamp(max=self.config.sinks)) * (before[row, 0] - count)
            return (now.table[row, pages.clamp(max=columns - 1)] * every + lists % every).int()

        pieces, size, in_place = list[Piece](), -(-every // self.groups(longest)), along[: 1 if capacity else None]
        for first in range(0, every if capacity else 0, size):
            of_group = wanted * ((head >= first) & (head < first + size))
            most = rows * sum(min(pages, columns - 1) for pages in heads.limits[first : first + size])
            if step.is_captured and most > _PIECES * capacity:
                most, in_place = _PIECES * capacity, along
            pieces += cut(of_group.flatten(), most, capacity, page, nth_of)
        staged = sum((piece.tokens for piece in pieces), torch.zeros_like(lists))
        attended, is_kept = now.seq_lens[:, None] - (before - wanted) * page, (head[:, None] == heads.kept).any(1)
        here = nth_of(lists, staged // page + in_place)[:, None], (attended * ~is_kept).view(-1, 1) - staged
        resident = None
        if heads.resident:
            ids = store_pages(now.table[:, :columns], heads.kept, every)
            resident = ids.view(len(lists), 1, columns), (now.seq_lens[:, None] * is_kept).view(-1, 1)
        return _Plan(here, resident, pieces, along[:capacity])


def _resident(config: HybridConfig, model: ModelSpec) -> dict[int, tuple[int, ...]]:
    """Of the layers with full attention."""
    found = _by_layer("resident_heads", config, model.num_layers, model.num_kv_heads)
    return {layer: heads for layer, heads in found.items() if model.window(layer) is None}


def _by_layer(key: str, config: HybridConfig, layers: int, kv_heads: int) -> dict[int, tuple[int, ...]]:
    """What ``headinfer.{key}`` names."""
    return by_layer(named_heads(f"headinfer.{key}", getattr(config.headinfer, key), layers, kv_heads))
