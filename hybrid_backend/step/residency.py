"""Which pages the frames of running requests hold: by the maps, as scores say, or by where a page belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, ModelSpec, PrefillRow, sent
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.operations import Maps
from hybrid_backend.step.admission import Admission
from hybrid_backend.step.placement import Placement
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.state import StepState


class Residency(Protocol):
    """Frames of requests that begin to decode, take the next page, and end."""

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """A prompt chunk was attended in ``layer``."""

    def admit(self, request_id: str, index: int, table: Tensor, num_pages: int) -> int:
        """Fill the empty frames of an index, in all layers. ``table``: ``[1, num_pages]`` int32 host pages. Returns the
        pages copied."""

    def open(self, rows: DecodeRows, indices: list[int]) -> int:
        """A step begins; its inputs are written. ``indices``: of the rows' requests. Returns the pages copied."""

    def release(self, request_id: str, index: int | None) -> None:
        """The request is gone."""


class MappedFrames:
    """Any page may lie in any frame of its request, layer by layer; the maps know which. A request begins with its most
    important pages, copies over the least important ones become visible when a step begins, and so does the page of
    the step's token. ``maps[layer]``: of the layer."""

    def __init__(
        self, config: HybridConfig, model: ModelSpec, tiers: Tiers, state: StepState, maps: dict[int, Maps]
    ) -> None:
        self._config, self._tiers, self._state, self._maps = config, tiers, state, maps
        self._admission = Admission(config, model, tiers)
        self._has_recalls = state.copies.frames.shape[2] > 0
        requests = tiers.frames.requests
        for row, layer in enumerate(maps):  # frames that a layer does not have are never the least important
            state.empty[row, maps[layer].size :] = float("inf")
        state.maps.importance.copy_(state.empty.repeat_interleave(requests, 1))

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        self._admission.saw(layer, row, q)

    def admit(self, request_id: str, index: int, table: Tensor, num_pages: int) -> int:
        copied = sum(
            self._admission.admit(layer, maps, request_id, index, table, num_pages)
            for layer, maps in self._maps.items()
        )
        self._admission.forget(request_id)
        return copied

    def open(self, rows: DecodeRows, indices: list[int]) -> int:
        operations, maps, now = self._tiers.operations, self._state.maps, self._state.inputs
        if self._has_recalls:
            operations.commit_pages(maps, self._state.copies, self._tiers.frames.generation)
        page_size, sinks = self._config.page_size, self._config.sinks
        operations.open_pages(maps, now.requests, now.pages, now.positions, page_size, sinks)
        return 0

    def release(self, request_id: str, index: int | None) -> None:
        self._admission.forget(request_id)
        if index is not None:
            maps, requests = self._state.maps, self._tiers.frames.requests
            maps.frame_of[:, index] = -1
            maps.page_of[:, index::requests] = -1
            maps.importance[:, index::requests] = self._state.empty


class FixedFrames:
    """Each page belongs in one frame of its request, the same in all layers; of the pages that share one the latest has
    it. So the map is written once.

    Args:
        frame_of: `Method.frame_of`.
        held: `Method.held_pages`.
    """

    def __init__(
        self, tiers: Tiers, maps: Maps, frame_of: Callable[[Tensor], Tensor], held: Callable[[int], Tensor]
    ) -> None:
        self._tiers, self._frame_of, self._held = tiers, maps.frame_of, held
        requests, columns = maps.frame_of.shape[1:]
        first = torch.arange(requests, dtype=torch.int32, device=maps.frame_of.device)
        pages = torch.arange(columns, dtype=torch.int32, device=maps.frame_of.device)
        maps.frame_of.copy_(tiers.frames.ids(first[:, None], frame_of(pages)))

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Nobody's scores decide."""

    def admit(self, request_id: str, index: int, table: Tensor, num_pages: int) -> int:
        tiers, pages = self._tiers, sent(self._held(num_pages), self._tiers.device)
        host_pages, frames = table[0, pages].contiguous(), self._frame_of[0, index, pages].contiguous()
        for layer, store in tiers.frames.layers.items():
            tiers.operations.copy_pages(tiers.host.views[layer], store, host_pages, frames)
        return len(pages) * len(tiers.frames.layers)

    def open(self, rows: DecodeRows, indices: list[int]) -> int:
        """A page that begins takes the frame where it belongs."""
        return 0

    def release(self, request_id: str, index: int | None) -> None:
        """What the next request does not overwrite it does not read."""


class SharedFrames:
    """Requests are resident whole, in any frames of those that all share, or not at all. A frame id is the same in all
    layers, so the map is too. Where the device tier reads the host pool itself, requests are placed all the same.

    Args:
        is_settled: whether the request with this index is between two tokens.
    """

    def __init__(self, tiers: Tiers, maps: Maps, placement: Placement, is_settled: Callable[[int], bool]) -> None:
        self.placement = placement
        self.moved = 0  # requests that were evicted or came back, since start
        self._tiers, self._frame_of, self._is_settled = tiers, maps.frame_of, is_settled
        count = placement.pages if tiers.frames.layers else 0
        self._free = list(range(count - 1, -1, -1))
        self._frames: dict[int, list[int]] = {}  # by index

    @property
    def resident_pages(self) -> int:
        """Of one layer."""
        return sum(map(len, self._frames.values()))

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Nobody's scores decide."""

    def admit(self, request_id: str, index: int, table: Tensor, num_pages: int) -> int:
        """The step places it, with those that it runs beside."""
        return 0

    def open(self, rows: DecodeRows, indices: list[int]) -> int:
        pages = dict(zip(rows.request_ids, rows.num_pages.tolist(), strict=True))
        index_of = dict(zip(rows.request_ids, indices, strict=True))
        settled = {name for name, index in index_of.items() if self._is_settled(index)}
        moves = self.placement.step(pages, settled)
        self.moved += len(moves.evicted) + len(moves.returned)
        for name in moves.evicted:
            evicted = self._tiers.frames.index(name)
            if evicted is not None:
                self._give_back(evicted)
        if not self._tiers.frames.layers:
            return 0
        return sum(
            self._hold(index, rows.page_table[r, : pages[name]])
            for r, (name, index) in enumerate(index_of.items())
            if name in self.placement
        )

    def release(self, request_id: str, index: int | None) -> None:
        self.placement.release(request_id)
        if index is not None:
            self._give_back(index)

    def _hold(self, index: int, table: Tensor) -> int:
        """Frames for all pages of a request on the device. The pages of one that had none are copied; of others the
        step's token begins the new page."""
        held = self._frames.setdefault(index, [])
        had, new = len(held), len(table) - len(held)
        assert new >= 0, "a request with fewer pages than before was released"
        if not new:
            return 0
        held += [self._free.pop() for _ in range(new)]
        tiers, frames = self._tiers, sent(torch.tensor(held[had:], dtype=torch.int32), self._tiers.device)
        self._frame_of[:, index, had : len(held)] = frames
        if had:
            return 0
        host_pages = table.int().contiguous()
        for layer, store in tiers.frames.layers.items():
            tiers.operations.copy_pages(tiers.host.views[layer], store, host_pages, frames)
        return len(host_pages) * len(tiers.frames.layers)

    def _give_back(self, index: int) -> None:
        held = self._frames.pop(index, None)
        if held:
            self._free += held
            self._frame_of[:, index] = -1
