"""Method ``headinfer``: exact head-wise streaming (HeadInfer, arXiv 2502.12574).

All KV lies in host memory and passes through two staging buffers. While one buffer is attended, the next pages are
copied into the other one, through all groups of KV heads and layers of a step. The last page of a sequence grows, so it
is attended in the host pool; the other pages can be copied before a layer has its K and V. Prompts stream the same way,
chunk by chunk.

Optional (``headinfer.resident_heads``): heads whose KV also stays on the device, for each page of the host pool.

Optional (``headinfer.window_heads``, the paper's appendix D): heads that need no more than the first and the last
tokens of a sequence. These pages of a running request lie in frames, so that no byte of such a head crosses the bus in
a decode step. All heads have these frames, and heads that stream need only the pages in between. Prompts are attended
whole.
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
from hybrid_backend.attention.quality import covered_tokens
from hybrid_backend.batch import DecodeRows, ModelSpec, PrefillRow, Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels.operations import StreamPlan
from hybrid_backend.step.method import Method, OwnMemory, by_layer, named_heads, staging_tokens
from hybrid_backend.step.toolbox import PageLists
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.heads import ranks_among, resident_bytes, store_pages
from hybrid_backend.tiers.stream import head_pages

if TYPE_CHECKING:
    from hybrid_backend.step import Toolbox
    from hybrid_backend.tiers.stream import HeadStream

_PIECES = 6
"""Pieces of a layer in a captured graph, of all groups of heads together; so no layer has more than 20 launches. Later
pages are attended in the host pool, which a GPU reads over the bus: as many bytes as in pieces."""


class _Heads:
    """KV heads of the layers that have the same resident heads and the same window heads; all others stream.

    Attributes:
        resident: heads whose whole KV stays on the device.
        windowed: heads that attend their sinks and their window alone.
        streamed: all other heads.
        ranks: ``[kv_heads]`` int32 on the device: the ranks of `Operations.plan_stream`.
        store_ranks: ``[kv_heads]`` int32 on the device: position of each resident head in the layer's store.
    """

    def __init__(
        self, resident: tuple[int, ...], windowed: tuple[int, ...], kv_heads: int, device: torch.device
    ) -> None:
        """Sort the heads of a layer by where their KV is."""
        self.resident, self.windowed = tuple(sorted(resident)), windowed
        self.streamed = tuple(head for head in range(kv_heads) if head not in (*resident, *windowed))
        kinds = dict.fromkeys(resident, -1) | dict.fromkeys(windowed, -2)
        ranks = kinds | {head: rank for rank, head in enumerate(self.streamed)}
        self.ranks = torch.tensor([ranks[head] for head in range(kv_heads)], dtype=torch.int32, device=device)
        self.store_ranks = ranks_among(self.resident, kv_heads, device)


class _Plan(NamedTuple):
    """Pages that a step attends in all layers with the same `_Heads`.

    Attributes:
        stream: pages that pass through the staging buffers, and tokens that are attended elsewhere.
        store_ids: ``[rows, kv_heads, columns]`` int32 head pages of the store of resident heads; None if there is none.
        columns: most pages of a sequence.
        rest: most pages of a sequence that a head attends in the host pool.
    """

    stream: StreamPlan
    store_ids: Tensor | None
    columns: int
    rest: int


class HeadInfer(Method):
    """Attention on the device, over KV that lies in host memory."""

    name = "headinfer"
    reads_int8 = True
    attends_selection = False  # Heads with a window attend the pages that `covered` names.

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        _resident_heads(config, num_layers, num_kv_heads)
        _window_heads(config, num_layers, num_kv_heads)

    @classmethod
    def exact_tokens(cls, config: HybridConfig) -> float:
        return sum(_edges(config)) * config.page_size if _has_windows(config) else math.inf

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """Return buffers that hold all heads of the longest context whose heads are one group."""
        tokens = staging_tokens(config, config.headinfer.group_thresholds[0])
        frames = sum(_edges(config)) if _has_windows(config) else 0
        return TierLayout(separate=True, staging_tokens=tokens, frames_per_request=frames)

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        step = super().own_memory(config, model, device, pages, max_requests)
        resident = _of_full_layers(_resident_heads(config, model.num_layers, model.num_kv_heads), model)
        stores = resident_bytes(resident, model, config.page_size, pages)
        ids = _frame_ids(config, max_requests, torch.device("meta"))
        return OwnMemory(step.device + stores + ids.nbytes, step.host)

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        super().__init__(config, model, tiers)
        self._layers, kv_heads = tiers.layout.full_layers(model), model.num_kv_heads
        resident, windowed = (
            _of_full_layers(named(config, model.num_layers, kv_heads), model)
            for named in (_resident_heads, _window_heads)
        )
        kinds, self._heads = dict[object, _Heads](), dict[int, _Heads]()
        self._stores = tiers.keep_heads(resident).stores
        for layer in self._layers:
            of_layer = resident.get(layer, ()), windowed.get(layer, ())
            self._heads[layer] = kinds.setdefault(of_layer, _Heads(*of_layer, kv_heads, tiers.device))
        self._has_frames = _has_windows(config)
        self._first, self._last = _edges(config) if self._has_frames else (0, 1)  # Pages that no head streams.
        self._frame_ids = _frame_ids(config, tiers.frames.requests, tiers.device)
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
            kv = gather_tokens(store, row.pages, len(heads.resident), 0, tokens, q.dtype)
            resident.append(KVBlock(heads.resident, *kv))
        others = tuple(sorted((*heads.streamed, *heads.windowed)))
        before = chain(resident, self.tiers.prefix(layer, row.pages, tokens, others, self.groups(tokens)))
        return self.tiers.prompts.attend(q, own, before, self.model.sink(layer))

    # --- requests and frames ---

    @property
    def device_bytes(self) -> int:
        return self._frame_ids.nbytes

    def frame_of(self, pages: Tensor) -> Tensor:
        """Return `FixedFrames.frame_of`: sinks, then a ring of later pages. A context that fits lies in order."""
        first, last = self._first, self._last
        return torch.where(pages < first, pages, first + (pages - first) % last)

    def held_pages(self, num_pages: int) -> Tensor:
        pages = torch.arange(num_pages if self._has_frames else 0)
        return pages[(pages < self._first) | (pages >= num_pages - self._last)]

    # --- decoding rows ---

    def budgets(self, rows: DecodeRows) -> Tensor:
        return rows.num_pages.clamp(max=self._first + self._last) if self._has_frames else rows.num_pages

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        self._longest_tokens, self._has_prompts = int(rows.seq_lens.max()), not rows.whole_batch
        if self._has_frames:
            self._write_frame_ids(step)
        kv_heads, stream, page = self.model.num_kv_heads, self._stream, self.config.page_size
        middle = (rows.num_pages - self._first - self._last).clamp(min=0)
        tokens, pages, middle_pages = int(rows.seq_lens.sum()), int(rows.num_pages.sum()), int(middle.sum())
        for layer, heads in self._heads.items():
            streamed, windowed, resident = (len(x) / kv_heads for x in (heads.streamed, heads.windowed, heads.resident))
            framed_pages = pages - middle_pages if self._has_frames else 0
            on_device = resident * pages + (streamed + windowed) * framed_pages
            attended = tokens - windowed * middle_pages * page
            missing = streamed * (pages - framed_pages)
            step.counting.count_tokens(attended, on_device, missing_pages=missing, layers=[layer])
            # A captured graph with too few pieces copies less; the count ignores that.
            stream.copied_bytes += len(heads.streamed) * middle_pages * self.tiers.page_bytes // kv_heads

    def _write_frame_ids(self, step: Toolbox) -> None:
        """Write the frames of each row's sinks and window, in the order of their pages."""
        inputs, first, last = step.buffers.inputs, self._first, self._last
        places = torch.arange(first + last, dtype=torch.int32, device=self.tiers.device)
        middle = (inputs.num_pages[:, None] - first - last).clamp(min=0)
        pages = places + middle * (places >= first)
        self._frame_ids[:, 0] = self.tiers.frames.ids(inputs.requests[:, None], self.frame_of(pages))

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        rows, heads, host = len(q), self._heads[layer], self.tiers.host.views[layer]
        if layer == self._layers[0]:
            self._plans = {}
            self._staged = self._passing(step, rows, self._layers)
        if self._has_prompts and not step.is_captured:
            # Prompt chunks pass through the buffers between two layers, so that nothing is staged ahead.
            self._staged = self._passing(step, rows, [layer])
        plan, stores = self._plan(step, heads, rows), list[PageLists]()
        stream = plan.stream
        if heads.resident:
            store = head_pages(self._stores[layer])
            stores.append(PageLists(lambda: store, plan.store_ids, stream.resident, plan.columns))
        if self._has_frames:
            frames, ids = self.tiers.frames.layers[layer], self._frame_ids[:rows]
            stores.append(PageLists(lambda: frames, ids, stream.framed, ids.shape[2]))
        limit = min(plan.columns, self._stream.capacity)
        for begins, ends in zip(stream.begins, stream.ends, strict=True):
            stores.append(PageLists(lambda: next(self._staged), None, ends, limit, begins))
        if plan.rest:
            table = step.inputs(rows).table[:, None]
            stores.append(PageLists(lambda: host, table, stream.rest_ends, plan.rest, stream.rest_begins))
        return step.merge(layer, step.attend_stores(q, stores), None, q.dtype)

    def covered(self, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        windowed, count = self._heads[layer].windowed, int(rows.num_pages[r])
        if not windowed or count <= self._first + self._last:
            return None
        pages = torch.arange(count).repeat(self.model.num_kv_heads, 1)
        is_left_out = (pages >= self._first) & (pages < count - self._last)
        is_left_out[list(self._heads[layer].streamed + self._heads[layer].resident)] = False
        return covered_tokens(pages.masked_fill(is_left_out, -1), int(rows.seq_lens[r]), self.config.page_size)

    def abandon(self, step: Step) -> None:
        self._staged = iter(())

    @property
    def _stream(self) -> HeadStream:
        assert self.tiers.stream is not None
        return self.tiers.stream

    def _passing(self, step: Toolbox, rows: int, layers: list[int]) -> Iterator[Tensor]:
        """Yield the staging buffers as they are filled piece by piece."""
        copy_pages, host = self.tiers.operations.copy_pages, self.tiers.host.views
        plans = ((layer, self._plan(step, self._heads[layer], rows).stream) for layer in layers)
        return self._stream.through(
            partial(copy_pages, head_pages(host[layer]), host_pages=pages, frame_ids=places)
            for layer, stream in plans
            for pages, places in zip(stream.pages, stream.places, strict=True)
        )

    def _plan(self, step: Toolbox, heads: _Heads, rows: int) -> _Plan:
        """Return the plan for the open step's inputs, made in the first layer that needs it.

        A graph makes the plan whenever it is replayed, with room for the longest sequences of the engine.
        """
        if heads in self._plans:
            return self._plans[heads]
        inputs, page, capacity = step.inputs(rows), self.config.page_size, self._stream.capacity
        longest = step.shape.columns * page if step.is_captured else self._longest_tokens
        columns, streamed = -(-longest // page), len(heads.streamed)
        group = max(1, -(-streamed // self.groups(longest)))
        groups = -(-streamed // group)
        pieces = needed = -(-rows * max(0, columns - self._first - self._last) * group // capacity)
        if step.is_captured and groups:
            pieces = min(needed, max(1, _PIECES // groups))
        stream = self.tiers.operations.plan_stream(
            inputs.table, inputs.num_pages, inputs.seq_lens, heads.ranks, groups, group, pieces, capacity, page,
            self._first, self._last, self._has_frames,
        )  # fmt: skip
        store_ids = None
        if heads.resident:
            store_ids = store_pages(inputs.table[:, :columns], heads.store_ranks, len(heads.resident))
        rest = columns if pieces < needed else int(not self._has_frames)
        plan = self._plans[heads] = _Plan(stream, store_ids, columns, rest if streamed else 0)
        return plan


def _has_windows(config: HybridConfig) -> bool:
    """Tell whether there are heads with a window; with ``sparse: never`` the named heads attend everything."""
    return bool(config.headinfer.window_heads) and config.sparse != "never"


def _edges(config: HybridConfig) -> tuple[int, int]:
    """Return the first and the last pages of a sequence that lie in frames if there are heads with a window."""
    return config.sinks, -(-config.headinfer.window_tokens // config.page_size) + 1  # The last page may hold one token.


def _frame_ids(config: HybridConfig, requests: int, device: torch.device) -> Tensor:
    """Return a buffer ``[requests, 1, frames]`` int32 for the frames of each row's sinks and window."""
    frames = sum(_edges(config)) if _has_windows(config) else 0
    return torch.zeros(requests, 1, frames, dtype=torch.int32, device=device)


def _of_full_layers(heads: dict[int, tuple[int, ...]], model: ModelSpec) -> dict[int, tuple[int, ...]]:
    """Return the heads of the layers with full attention."""
    return {layer: of_layer for layer, of_layer in heads.items() if model.window(layer) is None}


def _resident_heads(config: HybridConfig, layers: int, kv_heads: int) -> dict[int, tuple[int, ...]]:
    """Return the heads of each layer that ``headinfer.resident_heads`` names.

    Raises:
        ConfigError: the model does not have one of the heads.
    """
    return by_layer(named_heads("headinfer.resident_heads", config.headinfer.resident_heads, layers, kv_heads))


def _window_heads(config: HybridConfig, layers: int, kv_heads: int) -> dict[int, tuple[int, ...]]:
    """Return the heads of each layer that ``headinfer.window_heads`` names.

    Raises:
        ConfigError: the model does not have one of the heads, or the head is a resident head, too.
    """
    keys = config.headinfer
    twice = sorted({*keys.window_heads} & {*keys.resident_heads})
    if twice:
        raise ConfigError(
            f"headinfer.window_heads: {twice[0]} is also in headinfer.resident_heads; remove it from one of them"
        )
    named = named_heads("headinfer.window_heads", keys.window_heads, layers, kv_heads)
    return by_layer(named) if _has_windows(config) else {}
