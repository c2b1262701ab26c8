"""Method ``headinfer``: exact head-wise streaming (HeadInfer, arXiv 2502.12574).

All KV lies in host memory and passes through two staging buffers: while one is attended, the next pages are copied into
the other, through all groups of KV heads and layers of a step. A sequence's last page, which grows, is attended where
it lies; so the others can be copied before a layer has its K and V. Prompts stream the same way, chunk by chunk.

Optional (``headinfer.resident_heads``): heads whose KV also stays on the device, for every page of the host pool.
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
    """KV heads of the layers that have the same resident heads; all others stream.

    Attributes:
        resident: heads whose KV stays on the device.
        streamed: the other heads.
        resident_ids: ``[n]`` int64 of ``resident`` on the device.
        streams: ``[kv_heads]`` int32 on the device: 1 for a streamed head, else 0.
    """

    def __init__(self, resident: tuple[int, ...], kv_heads: int, device: torch.device) -> None:
        """Sort the heads of a layer by whether they are in ``resident``."""
        self.resident = tuple(sorted(resident))
        self.streamed = tuple(head for head in range(kv_heads) if head not in resident)
        self.resident_ids = torch.tensor(self.resident, dtype=torch.int64, device=device)
        streams = [int(head not in resident) for head in range(kv_heads)]
        self.streams = torch.tensor(streams, dtype=torch.int32, device=device)


class _Plan(NamedTuple):
    """What a step attends in the layers of the same heads: a list of head pages for each row and KV head. Ids ``[lists,
    1, n]``, tokens ``[lists, 1]``, int32."""

    in_place: tuple[Tensor, Tensor]  # in the host pool
    resident: tuple[Tensor, Tensor] | None  # in the layer's store
    pieces: list[Piece]  # what passes through the buffers
    along: Tensor  # [n] int32 0, 1, ..: as many as a list may have in a piece


class HeadInfer(Method):
    """All attention on the device, all KV in host memory."""

    name = "headinfer"

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        _named_heads(config, num_layers, num_kv_heads)

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
        resident = _resident(config, model)
        kinds, self._heads = dict[object, _Heads](), dict[int, _Heads]()
        self._stores = tiers.keep_heads(resident, model).stores
        for layer in self._layers:
            of_layer = resident.get(layer, ())
            self._heads[layer] = kinds.setdefault(of_layer, _Heads(of_layer, kv_heads, tiers.device))
        self._plans: dict[_Heads, _Plan] = {}  # of the open step
        self._staged: Iterator[Tensor] = iter(())
        self._longest, self._has_prompts = 0, False  # tokens of a sequence of the open step

    def groups(self, tokens: int) -> int:
        """Groups of KV heads for a context of ``tokens`` tokens: 1, then twice as many beyond each threshold."""
        return int(2 ** sum(tokens > threshold for threshold in self.config.headinfer.group_thresholds))

    # --- prompts ---

    def prefill(self, layer: int, row: PrefillRow, q: Tensor, own: Partial) -> Tensor:
        heads, tokens = self._heads[layer], row.seq_len - len(q)
        resident: list[KVBlock] = []
        if heads.resident and tokens:
            store = self._stores[layer].flatten(0, 2)
            resident.append(KVBlock(heads.resident, *gather_tokens(store, row.pages, len(heads.resident), 0, tokens)))
        before = chain(
            resident,
            self.tiers.prefix(layer, row.pages, tokens, heads.streamed, self.groups(tokens)),
        )
        return self.tiers.prompts.attend(q, own, before, self.model.sink(layer))

    # --- decoding rows ---

    def budgets(self, rows: DecodeRows) -> Tensor:
        return rows.num_pages

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        self._longest, self._has_prompts = int(rows.seq_lens.max()), not rows.whole_batch
        kv_heads, stream = self.model.num_kv_heads, self.tiers.stream
        tokens, pages, full_pages = int(rows.seq_lens.sum()), int(rows.num_pages.sum()), int((rows.num_pages - 1).sum())
        for layer, heads in self._heads.items():
            on_device = pages if stream is None else len(heads.resident) * pages / kv_heads
            step.counting.count_tokens(tokens, on_device, missing_pages=pages - on_device, layers=[layer])
            if stream is not None:  # A captured graph with too few pieces copies less; the count ignores that.
                stream.copied_bytes += len(heads.streamed) * full_pages * self.tiers.page_bytes // kv_heads

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
        wanted = before * heads.streams  # [rows, kv_heads] of them

        def nth_of(lists: Tensor, nth: Tensor) -> Tensor:
            """Return the head pages of the host pool at these places of the lists."""
            return (now.table[lists // every, nth.clamp(max=columns - 1)] * every + lists % every).int()

        pieces, size, in_place = list[Piece](), -(-every // self.groups(longest)), along[: 1 if capacity else None]
        for first in range(0, every if capacity else 0, size):
            of_group = wanted * ((head >= first) & (head < first + size))
            most = rows * (columns - 1) * len(set(heads.streamed).intersection(range(first, first + size)))
            if step.is_captured and most > _PIECES * capacity:
                most, in_place = _PIECES * capacity, along
            pieces += cut(of_group.flatten(), most, capacity, page, nth_of)
        staged = sum((piece.tokens for piece in pieces), torch.zeros_like(lists))
        here = (
            nth_of(lists, staged // page + in_place)[:, None],
            (now.seq_lens[:, None] * heads.streams).view(-1, 1) - staged,
        )
        resident = None
        if heads.resident:
            ids = store_pages(now.table[:, :columns], heads.resident_ids, every)
            resident = ids.view(len(lists), 1, columns), (now.seq_lens[:, None] * (1 - heads.streams)).view(-1, 1)
        return _Plan(here, resident, pieces, along[:capacity])


def _resident(config: HybridConfig, model: ModelSpec) -> dict[int, tuple[int, ...]]:
    """Return the resident heads of each layer with full attention."""
    named = _named_heads(config, model.num_layers, model.num_kv_heads)
    return {layer: heads for layer, heads in named.items() if model.window(layer) is None}


def _named_heads(config: HybridConfig, layers: int, kv_heads: int) -> dict[int, tuple[int, ...]]:
    """Return the heads of each layer that ``headinfer.resident_heads`` names.

    Raises:
        ConfigError: the model does not have one of the heads.
    """
    return by_layer(named_heads("headinfer.resident_heads", config.headinfer.resident_heads, layers, kv_heads))
