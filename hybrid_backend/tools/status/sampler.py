"""Readings on demand, and the page's JSON that is made of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hybrid_backend import __version__
from hybrid_backend.errors import EngineError
from hybrid_backend.hardware import Hardware
from hybrid_backend.tools.status.glance import judge
from hybrid_backend.tools.status.history import History
from hybrid_backend.tools.status.model import Status
from hybrid_backend.tools.status.reading import Reading, read
from hybrid_backend.tools.status.source import Source
from hybrid_backend.tools.status.tiles import tile_groups

INTERVAL = 2.0  # seconds; the plugin publishes every half second
KEPT = 300  # columns: ten minutes
_LONGEST_GAP = 10  # intervals that one column may cover
_STALE = 5  # intervals after which a reading is old although none failed: one is still awaited
_PATIENCE = 1.0  # seconds that a viewer waits for a reading in flight


class Sampler:
    """The server's history, read from ``source`` at most every ``interval`` seconds, whoever asks how often.

    Args:
        source: returns a Prometheus text or raises EngineError.
        name: what the page calls the source.
        interval: seconds between two readings, at least.
        kept: columns of the history, at most.
        clock: returns Unix seconds.
        machine: a hardware profile of the server's machine.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        interval: float = INTERVAL,
        kept: int = KEPT,
        clock: Callable[[], float] = time.time,
        machine: Hardware | None = None,
    ) -> None:
        self.interval = interval
        self._source = source
        self._name = name
        self._clock = clock
        self._machine = machine
        self._history = History(kept, _LONGEST_GAP * interval)
        self._problem: str | None = None
        self._is_silent = False
        self._started = clock()
        self._asked = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Begin a reading if the last one is old enough, and wait a moment for the one in flight.

        A server that answers slowly does not make its viewers wait: they see the age of what is known instead.
        """
        if self._reading is None or self._reading.done():
            elapsed = self._clock() - self._asked
            if 0 <= elapsed < self.interval:
                return
            self._asked = self._clock()
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=_PATIENCE)

    def status(self, after: float = 0.0) -> Status:
        """Return what is known, with the columns later than ``after`` (Unix seconds)."""
        current = self._clock()
        last, rates, layers = self._history.last, self._history.rates, self._history.layers
        shown = last or Reading(time=0.0)
        stale = self._stale_seconds(current)
        glance = judge(last, rates, layers, self._machine, stale, self._problem)
        gauge = shown.gauges.get
        return Status(
            version=__version__,
            source=self._name,
            started=round(self._started, 3),
            now=round(current, 3),
            interval=self.interval,
            kept=self._history.kept,
            read=None if last is None else round(last.time, 3),
            stale_seconds=None if stale is None else round(stale, 3),
            problem=self._problem,
            engine=shown.engine,
            model=shown.model,
            preemptions=shown.preemptions,
            in_place=shown.is_in_place,
            host_pool_pages=gauge("hybrid_host_pool_pages"),
            device_bytes=gauge("hybrid_device_bytes"),
            digest_bytes=gauge("hybrid_digest_bytes"),
            frame_bytes=gauge("hybrid_frame_bytes"),
            context_cache_bytes=gauge("hybrid_context_cache_bytes"),
            headline=glance.headline,
            glance=glance.answers,
            changes=glance.changes,
            tiles=() if last is None else tile_groups(last, rates, layers),
            layers=layers,
            columns=tuple(column for column in self._history.columns if column.time > after),
        )

    async def _read(self) -> None:
        try:
            text = await self._source()
            reading = await asyncio.to_thread(read, text, self._clock())
        except EngineError as error:
            self._problem, self._is_silent = str(error), True
            return
        except Exception as error:  # Nobody awaits this task, so nobody else would tell the reason.
            self._problem = f"{self._name} cannot be read: {type(error).__name__}: {error}"
            self._is_silent = True
            return
        self._history = self._history.add(reading)
        self._problem, self._is_silent = _missing(reading), False

    def _stale_seconds(self, current: float) -> float | None:
        """Return the age of the last reading if a newer one failed or is long overdue."""
        last = self._history.last
        elapsed = max(current - (self._started if last is None else last.time), 0.0)
        return elapsed if self._is_silent or elapsed > _STALE * self.interval else None


def _missing(reading: Reading) -> str | None:
    if reading.engine is None and not reading.layers:
        return "the server's /metrics has nothing of vLLM, SGLang or this plugin; SGLang needs --enable-metrics"
    if not reading.layers and "hybrid_host_pool_pages" not in reading.gauges:
        return (
            "the server publishes no hybrid_* metrics: it runs without this plugin, or its workers do not share their "
            "metrics (set PROMETHEUS_MULTIPROC_DIR, as `hybrid serve` does)"
        )
    return None
