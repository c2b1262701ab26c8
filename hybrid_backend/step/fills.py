"""Copies of host pages to the frames of requests that began to decode without these pages on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybrid_backend.kernels.operations import Copies, Counters
from hybrid_backend.step.admission import Missing
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.side_stream import side_stream
from hybrid_backend.tiers.state import StepState

FILL_BYTES = 128 << 20
"""Bytes that a step begins to copy, unless one layer of one request has more: 2.5 ms of a bus of 50 GB/s."""
_RECALLED = Counters._fields.index("recalled_pages")


@dataclass
class _Fill:
    """Copies into the frames of one request in one layer. ``done`` is None until a GPU has begun them."""

    layer: int
    index: int
    copies: Copies
    done: torch.cuda.Event | None = None


class Fills:
    """Fills the reserved frames of requests in a CUDA stream of its own, layer by layer, over several steps.

    A reserved frame is empty and has infinite importance, so that no operation takes it. A page becomes resident at the
    beginning of a step that finds its copy done. Until then the page is like any other page that is not resident. The
    step's stream waits for a copy only if its request ends meanwhile, or begins a second page.
    """

    def __init__(self, tiers: Tiers, state: StepState, positions: dict[int, int]) -> None:
        """Begin without copies; ``positions`` has the position of each layer in the stacked maps."""
        self._tiers, self._state, self._positions = tiers, state, positions
        self._stream = torch.cuda.Stream(tiers.device) if tiers.device.type == "cuda" else None
        self._added: list[_Fill] = []
        self._waiting: deque[_Fill] = deque()
        self._begun: deque[_Fill] = deque()
        self._opened: set[int] = set()
        """Requests that have begun a page since their copies were added."""

    def add(self, layer: int, index: int, missing: Missing) -> None:
        """Add the copies of the pages of one layer of a request that have a reserved frame."""
        device, columns = self._tiers.device, self._state.empty.shape[1]
        # The width is that of recalls, so that a GPU compiles one kernel for both.
        frames, host_pages, pages, importance = (
            torch.nn.functional.pad(x, (0, columns - len(x)), value=-1)[None, None]
            for x in (missing.frames, missing.host_pages, missing.pages, missing.importance)
        )
        owner = torch.full((1, 1), index, dtype=torch.int32, device=device)
        generation = torch.full((1, 1), int(self._tiers.frames.generation[index]), dtype=torch.int64, device=device)
        self._added.append(_Fill(layer, index, Copies(frames, host_pages, pages, importance, owner, generation)))

    def commit(self) -> None:
        """Make the pages resident whose copies are done, without waiting for the others."""
        while self._begun and ((done := self._begun[0].done) is None or done.query()):
            self._commit(self._begun.popleft())

    def begin(self) -> None:
        """Begin copies of requests that were added before this step.

        A page that another row fills in the step in which a request begins to decode is then complete.
        """
        room = FILL_BYTES
        while self._waiting:
            fill = self._waiting[0]
            room -= fill.copies.frames.numel() * self._tiers.page_bytes
            if room < 0 and self._begun:
                break
            self._begun.append(self._waiting.popleft())
            with side_stream(self._stream):
                self._copy(fill)
                fill.done = None if self._stream is None else self._stream.record_event()
        self._waiting += self._added
        self._added.clear()

    def _copy(self, fill: _Fill) -> None:
        tiers, frames = self._tiers, fill.copies.frames[0, 0]
        tiers.operations.copy_pages(
            tiers.host.views[fill.layer], tiers.frames.layers[fill.layer], fill.copies.host_pages[0, 0], frames
        )
        self._state.counters[self._positions[fill.layer], _RECALLED] += (frames >= 0).sum()

    def _commit(self, fill: _Fill) -> None:
        """Make the pages of one layer resident in their reserved frames, and only there."""
        position, requests = self._positions[fill.layer], self._tiers.frames.requests
        own_pages = self._state.maps.page_of[position, fill.index :: requests]
        pages = fill.copies.pages[0, 0].masked_fill(fill.copies.frames[0, 0] < 0, -2)
        # A recall may have brought a page to another frame meanwhile, which is empty from now on.
        is_double = (own_pages[:, None] == pages).any(1)
        own_pages.masked_fill_(is_double, -1)
        self._state.maps.importance[position, fill.index :: requests].masked_fill_(is_double, float("-inf"))
        maps = self._state.maps.of(slice(position, position + 1))
        self._tiers.operations.commit_pages(maps, fill.copies, self._tiers.frames.generation)

    def make_room(self, index: int) -> None:
        """Prepare for a page that a request begins, which takes a frame that is not reserved.

        Admission leaves one frame that is not reserved. If the request begins a second page before its copies are done,
        the copies that have not begun are given up.
        """
        if not any(fill.index == index for fill in self._all()):
            return
        if index not in self._opened:
            self._opened.add(index)
            return
        begun = [fill for fill in self._begun if fill.index == index]
        self.release(index)
        for fill in begun:
            self._commit(fill)
        requests, maps = self._tiers.frames.requests, self._state.maps
        own_pages, importance = maps.page_of[:, index::requests], maps.importance[:, index::requests]
        importance.copy_(torch.where(own_pages < 0, self._state.empty, importance))

    def release(self, index: int) -> None:
        """Forget the copies of a request. The step's stream waits for those that have begun."""
        for fill in self._begun:
            if fill.index == index and fill.done is not None:
                torch.cuda.current_stream().wait_event(fill.done)
        self._opened.discard(index)
        self._added = [fill for fill in self._added if fill.index != index]
        self._waiting = deque(fill for fill in self._waiting if fill.index != index)
        self._begun = deque(fill for fill in self._begun if fill.index != index)

    def _all(self) -> Iterator[_Fill]:
        yield from self._begun
        yield from self._waiting
        yield from self._added
