"""Residency of whole requests in frames that all of them share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, PrefillRow, sent
from hybrid_backend.kernels.operations import Maps
from hybrid_backend.methods.apex.placement import Placement
from hybrid_backend.tiers import Tiers


class SharedResidency:
    """Residency of whole requests, in any of the frames that all requests share.

    A frame id is the same in all layers, so the map is too.

    Args:
        is_settled: whether the request with this index is between two tokens.
    """

    def __init__(self, tiers: Tiers, maps: Maps, placement: Placement, is_settled: Callable[[int], bool]) -> None:
        self.placement = placement
        self.moved = 0  # requests that were evicted or came back, since start
        self._tiers, self._frame_of, self._is_settled = tiers, maps.frame_of, is_settled
        self._free = list(range(placement.pages - 1, -1, -1))
        self._frames: dict[int, list[int]] = {}  # by index

    @property
    def shared_pages(self) -> int:
        """Frames of one layer that hold a page."""
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
