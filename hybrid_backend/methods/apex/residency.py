"""Residency of whole requests in frames that all of them share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, PrefillRow, Step, sent
from hybrid_backend.kernels.operations import Maps
from hybrid_backend.methods.apex.placement import Placement
from hybrid_backend.tiers import Tiers


class SharedResidency:
    """Residency of whole requests, in any of the frames that all requests share.

    A frame id is the same in all layers, so that all layers have the same map.
    """

    def __init__(self, tiers: Tiers, maps: Maps, placement: Placement, is_settled: Callable[[int], bool]) -> None:
        """Begin without requests; ``is_settled`` tells whether a request, by its index, is between two tokens."""
        self.placement = placement
        self.moved = 0
        """Requests that were evicted or came back since start."""
        self._tiers, self._frame_of, self._is_settled = tiers, maps.frame_of, is_settled
        self._free = list(range(placement.pages - 1, -1, -1))
        self._frames: dict[int, list[int]] = {}  # Keyed by the request's index.

    @property
    def shared_pages(self) -> int:
        """Frames of one layer that hold a page."""
        return sum(map(len, self._frames.values()))

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Do nothing, because whole requests are admitted whatever their scores."""

    def begin_prompts(self, step: Step) -> None:
        """Do nothing: prompts of this residency stream their earlier tokens from the host pool."""

    def admit(self, request_id: str, index: int, table: Tensor, seq_len: int) -> int:
        """Return 0: `open` places the request together with the other requests of the step."""
        return 0

    def lacks(self, index: int) -> bool:
        """Return False, because a request on the device has all of its pages there."""
        return False

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
        """Give frames to all pages of a request on the device, and return the copied pages of all layers.

        All pages are copied if the request had no frame. Otherwise the step's token begins the new page.
        """
        frames = self._frames.setdefault(index, [])
        had, new = len(frames), len(table) - len(frames)
        assert new >= 0, "a request with fewer pages than before was released"
        if not new:
            return 0
        frames += [self._free.pop() for _ in range(new)]
        tiers, new_frames = self._tiers, sent(torch.tensor(frames[had:], dtype=torch.int32), self._tiers.device)
        self._frame_of[:, index, had : len(frames)] = new_frames
        if had:
            return 0
        host_pages = table.int().contiguous()
        for layer, store in tiers.frames.layers.items():
            tiers.operations.copy_pages(tiers.host.views[layer], store, host_pages, new_frames)
        return len(host_pages) * len(tiers.frames.layers)

    def _give_back(self, index: int) -> None:
        frames = self._frames.pop(index, None)
        if frames:
            self._free += frames
            self._frame_of[:, index] = -1
