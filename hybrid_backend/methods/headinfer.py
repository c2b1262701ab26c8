"""Method ``headinfer``: exact head-wise streaming (HeadInfer, arXiv 2502.12574).

All KV lies in host memory and passes through two staging buffers. While one buffer is attended, the next pages are
copied into the other one, through all groups of KV heads and layers of a step. The last page of a sequence grows, so it
is attended in the host pool; the other pages can be copied before a layer has its K and V. Prompts stream the same way,
chunk by chunk.

Optional (``headinfer.resident_heads``): heads whose KV also stays on the device, for each page of the host pool.
"""

from __future__ import annotations

import math
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
"""Pieces of a layer that a captured graph holds, for each group of heads. Later pages are attended in the host pool,
which a GPU reads over the bus."""


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
    """Pages that a step attends in all layers with the same resident heads.

    A list is one KV head of a row. Ids are ``[lists, 1, n]`` int32 pages of one head, tokens are ``[lists, 1]`` int32.

    Attributes:
        in_place: ids and tokens in the host pool.
        resident: ids and tokens in the layer's store; None if no head is resident.
        pieces: pages that pass through the staging buffers.
        places: ``[n]`` int32 0, 1, ..., for as many pages as a list may have in a piece.
    """

    in_place: tuple[Tensor, Tensor]
    resident: tuple[Tensor, Tensor] | None
    pieces: list[Piece]
    places: Tensor


class HeadInfer(Method):
    """Attention on the device, over KV that lies in host memory."""

    name = "headinfer"

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        _named_heads(config, num_layers, num_kv_heads)

    @classmethod
    def exact_tokens(cls, config: HybridConfig) -> float:
        return math.inf

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """Return buffers that hold all heads of the longest context whose heads are one group."""
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
        self._stores = tiers.keep_heads(resident).stores
        for layer in self._layers:
            of_layer = resident.get(layer, ())
            self._heads[layer] = kinds.setdefault(of_layer, _Heads(of_layer, kv_heads, tiers.device))
        self._plans: dict[_Heads, _Plan] = {}  # Plans of the open step.
        self._staged: Iterator[Tensor] = iter(())
        self._longest_tokens, self._has_prompts = 0, False  # State of the open step.

    def groups(self, tokens: int) -> int:
        """Return the number of groups of KV heads for a context: 1, doubled by each threshold that it exceeds."""
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
        self._longest_tokens, self._has_prompts = int(rows.seq_lens.max()), not rows.whole_batch
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
        if self._has_prompts and not step.is_captured:
            # Prompt chunks pass through the buffers between two layers, so that nothing is staged ahead.
            self._staged = self._passing([layer])
        plan, merge, host = self._plans[self._heads[layer]], self.tiers.operations.merge_partials, self.tiers.host.views
        lists, merged = q.view(len(q) * self.model.num_kv_heads, -1, q.shape[2]), None
        if plan.resident is not None:
            merged = merge(*step.attend(lists, head_pages(self._stores[layer]), *plan.resident))
        for piece in plan.pieces:
            staged = step.attend(lists, next(self._staged), piece.first + plan.places, piece.tokens)
            merged = merge(*staged, extra_partial=merged)
        last = step.attend(lists, head_pages(host[layer]), *plan.in_place)
        return step.merge(layer, last, merged, q.dtype)

    def abandon(self, step: Step) -> None:
        self._staged = iter(())

    def _passing(self, layers: list[int]) -> Iterator[Tensor]:
        """Yield the staging buffers as they are filled piece by piece."""
        if self.tiers.stream is None:
            return iter(())
        copy_pages, host = self.tiers.operations.copy_pages, self.tiers.host.views
        return self.tiers.stream.through(
            partial(copy_pages, head_pages(host[layer]), host_pages=piece.pages, frame_ids=piece.places)
            for layer in layers
            for piece in self._plans[self._heads[layer]].pieces
        )

    def _plan(self, step: Toolbox, heads: _Heads, rows: int) -> _Plan:
        """Return the plan for the open step's inputs.

        A graph computes the plan whenever it is replayed, with room for the longest sequences of the engine.
        """
        inputs, page, kv_heads = step.inputs(rows), self.config.page_size, self.model.num_kv_heads
        capacity = 0 if self.tiers.stream is None else self.tiers.stream.capacity
        longest = step.shape.columns * page if step.is_captured else self._longest_tokens
        columns = -(-longest // page)
        numbers = partial(torch.arange, dtype=torch.int32, device=self.tiers.device)
        head, lists, places = numbers(kv_heads), numbers(rows * kv_heads)[:, None], numbers(columns)
        before = (inputs.num_pages[:, None] - 1).clamp(min=0)  # [rows, 1] pages without the last one
        streamed = before * heads.streams  # [rows, kv_heads] pages

        def head_pages_at(lists: Tensor, nth: Tensor) -> Tensor:
            """Return the head pages of the host pool at these places of the lists."""
            return (inputs.table[lists // kv_heads, nth.clamp(max=columns - 1)] * kv_heads + lists % kv_heads).int()

        pieces, size, in_place = list[Piece](), -(-kv_heads // self.groups(longest)), places[: 1 if capacity else None]
        for first in range(0, kv_heads if capacity else 0, size):
            of_group = streamed * ((head >= first) & (head < first + size))
            most = rows * (columns - 1) * len(set(heads.streamed).intersection(range(first, first + size)))
            if step.is_captured and most > _PIECES * capacity:
                most, in_place = _PIECES * capacity, places
            pieces += cut(of_group.flatten(), most, capacity, page, head_pages_at)
        staged = sum((piece.tokens for piece in pieces), torch.zeros_like(lists))
        in_host = (
            head_pages_at(lists, staged // page + in_place)[:, None],
            (inputs.seq_lens[:, None] * heads.streams).view(-1, 1) - staged,
        )
        resident = None
        if heads.resident:
            ids = store_pages(inputs.table[:, :columns], heads.resident_ids, kv_heads)
            resident = ids.view(len(lists), 1, columns), (inputs.seq_lens[:, None] * (1 - heads.streams)).view(-1, 1)
        return _Plan(in_host, resident, pieces, places[:capacity])


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
