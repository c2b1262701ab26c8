"""Placement of whole requests on the device tier, by arrival (APEX, arXiv 2506.03296, section 3.4).

APEX takes the placement from NEO (arXiv 2411.01142). The policy counts pages and touches no memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass
class Moves:
    """Requests that a step moves. Requests that begin to decode are in neither list.

    Attributes:
        evicted: requests that go to the CPU. Nothing is copied, because the host pool has all pages.
        returned: requests that come back to the device; their pages are copied in.
    """

    evicted: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)


class Placement:
    """Requests on the device tier, which hold at most ``pages`` pages together. All other requests are on the CPU.

    A request that begins goes to the CPU only if it does not fit; then the later requests of that step go there too.
    A request that grows without room evicts the youngest request on the device, perhaps itself. In steps without an
    eviction the oldest requests on the CPU come back, as long as they leave the device at most ``swap_in`` full. A
    request that is too large to come back does not block younger requests. No request waits for a place, because the
    CPU decodes it meanwhile.
    """

    def __init__(self, pages: int, swap_in: float) -> None:
        """Begin without requests, over a device of ``pages`` pages."""
        self.pages = pages
        self.used = 0
        self._return_limit = int(swap_in * pages)  # Used pages up to which requests come back.
        self._pages_of: dict[str, int] = {}  # Pages of the requests on the device.
        self._order: dict[str, None] = {}  # All requests, by arrival.

    def __contains__(self, request: str) -> bool:
        """Tell whether a request is on the device."""
        return request in self._pages_of

    @property
    def requests(self) -> int:
        """Number of requests on the device."""
        return len(self._pages_of)

    def step(self, rows: Mapping[str, int], settled: Collection[str]) -> Moves:
        """Place the requests of a step.

        Args:
            rows: pages of each request of the step.
            settled: requests among them that are between two tokens.
        """
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
        """Forget a request that is gone. Unknown requests are ignored."""
        self._order.pop(request, None)
        self.used -= self._pages_of.pop(request, 0)

    def _grow(self, rows: Mapping[str, int], moves: Moves) -> None:
        for request, pages in rows.items():
            if request in self._pages_of:
                self._put(request, pages)
        while self.used > self.pages:
            youngest = next(request for request in reversed(self._order) if request in self._pages_of)
            self.used -= self._pages_of.pop(youngest)
            moves.evicted.append(youngest)

    def _take_back(self, rows: Mapping[str, int], settled: Collection[str], moves: Moves) -> None:
        waiting = [request for request in self._order if request not in self._pages_of and request in rows]
        for request in waiting:
            if rows[request] > self._return_limit:
                continue
            if self.used + rows[request] > self._return_limit or request not in settled:
                break
            self._put(request, rows[request])
            moves.returned.append(request)

    def _put(self, request: str, pages: int) -> None:
        self.used += pages - self._pages_of.get(request, 0)
        self._pages_of[request] = pages
