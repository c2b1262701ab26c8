"""Readings on demand, from a server's address or from the server's own process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from http.client import HTTPException
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from hybrid_backend import __version__
from hybrid_backend.errors import EngineError
from hybrid_backend.tools.status.glance import glance
from hybrid_backend.tools.status.history import History
from hybrid_backend.tools.status.model import Status
from hybrid_backend.tools.status.reading import Reading, read

INTERVAL = 2.0  # seconds; the plugin publishes every half second
KEPT = 300  # columns: ten minutes
_LONGEST_GAP = 10  # intervals that one column may cover
_TIMEOUT = 10.0  # seconds; a busy server answers late
_LONGEST_TEXT = 32 * 2**20  # bytes; a real /metrics has some hundred kilobytes


class Sampler:
    """The server's history, read from ``source`` at most every ``interval`` seconds, whoever asks how often.

    ``source`` returns a Prometheus text or raises EngineError; it runs in a thread.
    """

    def __init__(
        self,
        source: Callable[[], str],
        name: str,
        interval: float = INTERVAL,
        kept: int = KEPT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.interval = interval
        self._source = source
        self._name = name
        self._clock = clock
        self._history = History(kept, _LONGEST_GAP * interval)
        self._problem: str | None = None
        self._started = clock()
        self._asked = float("-inf")
        self._lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Take a reading if the last one is old enough."""
        async with self._lock:
            now = self._clock()
            if 0 <= now - self._asked < self.interval:
                return
            self._asked = now
            try:
                self._accept(read(await asyncio.to_thread(self._source), self._clock()))
            except EngineError as error:
                self._problem = str(error)

    def status(self, after: float = 0.0) -> Status:
        """What is known now, with the columns later than ``after`` (Unix seconds)."""
        last = self._history.last or Reading(time=0.0)
        gauge = last.gauges.get
        return Status(
            version=__version__,
            source=self._name,
            started=round(self._started, 3),
            now=round(self._clock(), 3),
            interval=self.interval,
            kept=self._history.kept,
            problem=self._problem,
            engine=last.engine,
            model=last.model,
            preemptions=last.preemptions,
            in_place=last.is_in_place,
            host_pool_pages=gauge("hybrid_host_pool_pages"),
            device_bytes=gauge("hybrid_device_bytes"),
            digest_bytes=gauge("hybrid_digest_bytes"),
            frame_bytes=gauge("hybrid_frame_bytes"),
            context_cache_bytes=gauge("hybrid_context_cache_bytes"),
            glance=glance(last, self._history.columns, self._history.layers) if self._history.columns else (),
            layers=self._history.layers,
            columns=tuple(column for column in self._history.columns if column.time > after),
        )

    def _accept(self, reading: Reading) -> None:
        self._history = self._history.add(reading)
        self._problem = _missing(reading)


def _missing(reading: Reading) -> str | None:
    if reading.engine is None and not reading.layers:
        return "the server's /metrics has nothing of vLLM, SGLang or this plugin; SGLang needs --enable-metrics"
    if not reading.layers and "hybrid_host_pool_pages" not in reading.gauges:
        return (
            "the server publishes no hybrid_* metrics: it runs without this plugin, or its workers do not share their "
            "metrics (set PROMETHEUS_MULTIPROC_DIR, as `hybrid serve` does)"
        )
    return None


def metrics_url(server: str) -> str:
    """``http://host:port/metrics`` of a server's address as a user writes it. Raises EngineError if it is none."""
    url = server.strip()
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(c.isspace() for c in url):
        raise EngineError(f"{server!r} is not a server's address; write it as http://localhost:8000")
    path = parts.path.rstrip("/")
    for ending in ("/metrics", "/v1"):
        path = path.removesuffix(ending)
    return urlunsplit((parts.scheme, parts.netloc, f"{path}/metrics", "", ""))


def from_server(url: str) -> Callable[[], str]:
    """A source that asks ``url`` (of /metrics)."""

    def fetch() -> str:
        try:
            with urlopen(Request(url, headers={"Accept": "text/plain"}), timeout=_TIMEOUT) as answer:
                text = bytes(answer.read(_LONGEST_TEXT))
                if answer.length and len(text) < _LONGEST_TEXT:  # of what was announced, what did not come
                    raise EngineError(f"{url} cannot be read: the answer ends too early")
                return text.decode("utf-8", "replace")
        except URLError as error:
            raise EngineError(f"{url} cannot be read: {getattr(error, 'reason', error)}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise EngineError(f"{url} cannot be read: {error or type(error).__name__}") from error

    return fetch


def from_this_process() -> str:
    """The metrics of the server in whose process this runs, its workers' among them."""
    # Imported late: see reading.read.
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(REGISTRY).decode()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()
