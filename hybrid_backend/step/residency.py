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
        """Forget a request that is gone."""

    @property
    def shared_pages(self) -> int | None:
        """Frames of one layer that hold a page, where all requests share the frames; else None."""


class MappedResidency:
    """Residency in which any page may lie in any frame of its request, layer by layer, as the maps say.

    A request begins with its most important pages. Copies over the least important pages become visible when a step
    begins, and so does the page of the step's token.
    """

    shared_pages = None

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


class FixedResidency:
    """Residency in which each page belongs in one frame of its request, the same in all layers.

    Of the pages that share a frame the latest one has it. So the map is written once.

    Args:
        frame_of: `FixedFrames.frame_of` of the method.
        held: `FixedFrames.held_pages` of the method.
    """

    shared_pages = None

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
