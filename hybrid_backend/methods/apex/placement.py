"""Which running requests are on the device tier: whole requests, by arrival (APEX, arXiv 2506.03296, section 3.4; NEO,
arXiv 2411.01142, on which it rests). A policy over numbers of pages; nothing here touches memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass
class Moves:
    """What a step changes. Requests that begin to decode are in neither list."""

    evicted: list[str] = field(default_factory=list)  # to the CPU: nothing is copied, the host pool has every page
    returned: list[str] = field(default_factory=list)  # to the device: their pages are copied in


class Placement:
    """Requests on the device tier, which never hold more than ``pages`` pages together; the others are on the CPU.

    The device comes first: a request that begins goes to the CPU only if it does not fit, and once one went there so do
    the later ones of that step. A request that grows without room evicts the youngest one on the device, perhaps
    itself. In steps in which nobody was evicted the oldest requests on the CPU come back while the device is then at
    most ``swap_in`` full; one that could never come back holds up nobody. No request waits for a place: on the CPU it
    goes on as well.
    """

    def __init__(self, pages: int, swap_in: float) -> None:
        self.pages = pages
        self.used = 0
        self._room = int(swap_in * pages)  # for a request that comes back
        self._held: dict[str, int] = {}  # pages of requests on the device
        self._order: dict[str, None] = {}  # all requests, as they arrived

    def __contains__(self, request: str) -> bool:
        """Whether the request is on the device."""
        return request in self._held

    @property
    def requests(self) -> int:
        """On the device."""
        return len(self._held)

    def step(self, rows: Mapping[str, int], settled: Collection[str]) -> Moves:
        """``rows``: pages of each request of this step; ``settled``: those of them that are between two tokens."""
        moves = Moves()
        self._grow(rows, moves)
        if not moves.evicted:
            self._take_back(rows, settled, moves)
        is_full = bool(moves.evicted)
        for request, pages in rows.items():
            if request in self._order:
                continue
            self._order[request] = None
            is_full = is_full or self.used + pages > self.pages
            if not is_full:
                self._put(request, pages)
        return moves

    def release(self, request: str) -> None:
        """The request is gone. Unknown ones are ignored."""
        self._order.pop(request, None)
        self.used -= self._held.pop(request, 0)

    def _grow(self, rows: Mapping[str, int], moves: Moves) -> None:
        for request, pages in rows.items():
            if request in self._held:
                self._put(request, pages)
        while self.used > self.pages:
            youngest = next(request for request in reversed(self._order) if request in self._held)
            self.used -= self._held.pop(youngest)
            moves.evicted.append(youngest)

    def _take_back(self, rows: Mapping[str, int], settled: Collection[str], moves: Moves) -> None:
        waiting = [each for each in self._order if each not in self._held and each in rows]
        for request in waiting:
            if rows[request] > self._room:
                continue
            if self.used + rows[request] > self._room or request not in settled:
                break
            self._put(request, rows[request])
            moves.returned.append(request)

    def _put(self, request: str, pages: int) -> None:
        self.used += pages - self._held.get(request, 0)
        self._held[request] = pages
