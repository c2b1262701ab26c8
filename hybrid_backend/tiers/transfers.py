"""Host-to-device copies of whole pages into slots, beside the step, and when they become visible."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_backend.errors import DeadlineError
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.slots import SlotPool


@dataclass(frozen=True)
class Recall:
    """Copy ``host_pages`` into ``slots`` (global ids) of one region's layer, then call ``commit``."""

    layer: int
    region: int
    generation: int
    host_pages: Tensor
    slots: Tensor
    commit: Callable[[], None]


class Transfers:
    """One copy thread. A copy whose region was released meanwhile is neither made nor committed."""

    def __init__(self, host: HostPool, slots: SlotPool, deadline: float) -> None:
        self._host = host
        self._slots = slots
        self._deadline = deadline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hybrid-recall") if slots.separate else None
        self._in_flight: list[tuple[Recall, Future[None] | None]] = []
        self.copied_bytes = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def pages_in_flight(self) -> int:
        """Pages of those copies whose request still owns its region."""
        current = self._slots.generation
        return sum(len(r.slots) for r, _ in self._in_flight if r.generation == int(current[r.region]))

    def copy(self, recall: Recall) -> None:
        """Make the copy now, in the calling thread (used to fill a cold region)."""
        if recall.generation != int(self._slots.generation[recall.region]) or not self._slots.separate:
            return
        with torch.inference_mode():
            source = self._host.layers[recall.layer][recall.host_pages]
            target = self._slots.layers[recall.layer]
            target[recall.slots.to(target.device)] = source.to(target.device)
            self.copied_bytes += source.nbytes

    def submit(self, recall: Recall) -> None:
        """Start a copy; `finish` makes it visible."""
        future = self._thread.submit(self.copy, recall) if self._thread else None
        self._in_flight.append((recall, future))

    def finish(self, layer: int | None = None) -> int:
        """Wait for all copies (of one layer), commit those whose request still owns its region. A copy that is late,
        and those after it, stay under way: they are waited for the next time.

        Returns:
            Pages committed.

        Raises:
            DeadlineError: a copy did not end in time.
        """
        waiting = [entry for entry in self._in_flight if layer in (None, entry[0].layer)]
        self._in_flight = [entry for entry in self._in_flight if layer not in (None, entry[0].layer)]
        pages = 0
        try:
            while waiting:
                recall, future = waiting[0]
                if future is not None:
                    future.result(self._deadline)
                del waiting[0]
                if recall.generation == int(self._slots.generation[recall.region]):
                    recall.commit()
                    pages += len(recall.slots)
        except Late:
            raise DeadlineError(
                f"the copy of {len(recall.slots)} pages of layer {recall.layer} did not end within {self._deadline} s"
            ) from None
        finally:
            self._in_flight += waiting
        return pages

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
