"""Frames that running prompts may use: those of request indices, or those that all requests share."""

from __future__ import annotations

from typing import Protocol

from hybrid_backend.tiers.frames import FramePool


class FrameSupply(Protocol):
    """Gives frames to running prompts (`PromptFrames`). Decoding requests may take borrowed frames back at any time."""

    def reserve(self, request_id: str) -> int | None:
        """Return the index whose frames a prompt owns, the same one until the frames are lost; None: no frames."""

    def index(self, request_id: str) -> int | None:
        """Return the index that a request has when it begins to decode."""

    def own(self, index: int) -> list[int]:
        """Return the frames that belong to an index, in the order of the pages that they hold if all pages fit."""

    def borrow(self, request_id: str, count: int) -> list[int]:
        """Lend frames that nobody uses to a prompt, ``count`` or another number; empty: all frames are in use."""

    def lost(self, request_id: str) -> set[int]:
        """Return the borrowed frames that were taken back since the last call."""

    def give_back(self, request_id: str) -> None:
        """End the loans of a prompt."""


class IndexedFrames:
    """Frames by request index: a prompt owns those of the index that it will decode with, and borrows free indices."""

    def __init__(self, pool: FramePool) -> None:
        self._pool = pool
        self._borrowed: dict[str, set[int]] = {}  # Indices that each prompt has borrowed and not lost.

    def reserve(self, request_id: str) -> int | None:
        return self._pool.reserve(request_id)

    def index(self, request_id: str) -> int | None:
        return self._pool.index(request_id)

    def own(self, index: int) -> list[int]:
        return [index + slot * self._pool.requests for slot in range(self._pool.size)]

    def borrow(self, request_id: str, count: int) -> list[int]:
        index = self._pool.lend(request_id)
        if index is None:
            return []
        self._borrowed.setdefault(request_id, set()).add(index)
        return self.own(index)

    def lost(self, request_id: str) -> set[int]:
        borrowed = self._borrowed.get(request_id, set())
        lost = borrowed - self._pool.lent(request_id)
        borrowed -= lost
        return {frame for index in lost for frame in self.own(index)}

    def give_back(self, request_id: str) -> None:
        self._borrowed.pop(request_id, None)
        self._pool.return_lent(request_id)


class SharedFrames:
    """Frames that all requests share: a prompt owns none and borrows those that no decoding request uses."""

    def __init__(self, count: int) -> None:
        """Begin with ``count`` free frames."""
        self._free = dict.fromkeys(range(count))
        self._borrower: dict[int, str] = {}  # Request of each borrowed frame.
        self._lost: dict[str, set[int]] = {}

    def reserve(self, request_id: str) -> int | None:
        return 0

    def index(self, request_id: str) -> int | None:
        return 0

    def own(self, index: int) -> list[int]:
        return []

    def borrow(self, request_id: str, count: int) -> list[int]:
        frames = [self._free.popitem()[0] for _ in range(min(count, len(self._free)))]
        self._borrower |= dict.fromkeys(frames, request_id)
        return frames

    def lost(self, request_id: str) -> set[int]:
        return self._lost.pop(request_id, set())

    def give_back(self, request_id: str) -> None:
        self._lost.pop(request_id, None)
        frames = [frame for frame, borrower in self._borrower.items() if borrower == request_id]
        for frame in frames:
            del self._borrower[frame]
        self._free |= dict.fromkeys(frames)

    # --- decoding requests ---

    def take(self, count: int) -> list[int]:
        """Take frames for a decoding request: free ones, then those that prompts borrowed last."""
        while len(self._free) < count:
            frame, borrower = self._borrower.popitem()
            self._lost.setdefault(borrower, set()).add(frame)
            self._free[frame] = None
        return [self._free.popitem()[0] for _ in range(count)]

    def keep(self, frames: list[int]) -> None:
        """Take these free frames, which hold pages of a request that begins to decode."""
        for frame in frames:
            del self._free[frame]

    def free(self, frames: list[int]) -> None:
        """Free the frames of a decoding request."""
        self._free |= dict.fromkeys(frames)
