"""Readings on demand, and the page's JSON that is made of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from hybrid_backend import __version__
from hybrid_backend.errors import EngineError
from hybrid_backend.tools.status.history import History
from hybrid_backend.tools.status.judge import Load, judge, unjudged
from hybrid_backend.tools.status.model import Answer, Status
from hybrid_backend.tools.status.reading import Reading, read
from hybrid_backend.tools.status.source import Source

INTERVAL = 2.0  # seconds; the plugin publishes every half second
MAX_COLUMNS = 300  # ten minutes
_LONGEST_GAP = 10  # intervals that one column may cover
_STALE = 5  # intervals without a reading after which the server counts as silent
_PATIENCE = 1.0  # seconds that a viewer waits for a reading


class Sampler:
    """The server's history, read at most once an interval, however many viewers ask.

    Args:
        source: returns a Prometheus text or raises EngineError.
        name: name of the source on the page.
        interval: seconds between two readings, at least.
        max_columns: columns of the history, at most.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        interval: float = INTERVAL,
        max_columns: int = MAX_COLUMNS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.interval = interval
        self._source, self._name, self._clock = source, name, clock
        self._history = History(max_columns, _LONGEST_GAP * interval)
        self._problem: str | None = None
        self._is_silent = False
        self._started = clock()
        self._last_request = float("-inf")
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """Reason for which there is no fresh reading, or what the reading lacks, in one line."""
        return self._problem

    async def refresh(self) -> None:
        """Start a reading if the last one is old enough, and wait a moment for the reading in flight.

        A server that answers slowly does not make its viewers wait: they see the age of the last reading instead.
        """
        if self._task is None or self._task.done():
            if 0 <= self._clock() - self._last_request < self.interval:
                return
            self._last_request = self._clock()
            self._task = asyncio.create_task(self._read())
        await asyncio.wait({self._task}, timeout=_PATIENCE)

    def status(self, after: float = 0.0) -> Status:
        """Return the page's JSON, with the columns later than ``after`` (Unix seconds)."""
        history, current = self._history, self._clock()
        last, rates, layers = history.last, history.rates, history.layers
        shown = last or Reading(time=0.0)
        elapsed = max(current - (self._started if last is None else last.time), 0.0)
        stale = elapsed if self._is_silent or elapsed > _STALE * self.interval else None
        answers: tuple[Answer, ...] = ()
        if last is None or rates is None or stale is not None:
            headline = unjudged(last is not None, stale, self._problem)
        else:
            headline, answers = judge(Load(last, rates, layers))
        return Status(
            version=__version__,
            source=self._name,
            started=self._started,
            now=current,
            interval=self.interval,
            kept=history.columns.maxlen or 0,
            read=None if last is None else last.time,
            stale_seconds=stale,
            problem=self._problem,
            engine=shown.engine,
            model=shown.model,
            in_place=shown.is_in_place,
            figures={name: value for name, value in shown.figures.items() if math.isfinite(value)},
            headline=headline,
            glance=answers,
            layers=layers,
            columns=tuple(column for column in history.columns if column.time > after),
        )

    async def _read(self) -> None:
        try:
            reading = await asyncio.to_thread(read, await self._source(), self._clock())
        except Exception as error:  # Nobody awaits this task, so nobody else would report the reason.
            reason = f"{self._name} cannot be read: {type(error).__name__}: {error}"
            self._problem, self._is_silent = str(error) if isinstance(error, EngineError) else reason, True
            return
        self._history.add(reading)
        self._problem, self._is_silent = _missing(reading), False


def _missing(reading: Reading) -> str | None:
    """Return one line that says which metrics the status page misses; None if the server publishes them all."""
    if reading.engine is None and not reading.layers:
        return "the server's /metrics has nothing of vLLM, SGLang or this plugin; SGLang needs --enable-metrics"
    if not reading.layers and reading.get("host_pool_pages") is None:
        return (
            "the server publishes no hybrid_* metrics: it runs without this plugin, or its workers do not share their "
            "metrics (set PROMETHEUS_MULTIPROC_DIR, as `hybrid serve` does)"
        )
    return None
