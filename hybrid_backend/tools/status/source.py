"""Sources of a Prometheus text: a server's address, or the process of the server itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from hybrid_backend.errors import EngineError

Source = Callable[[], Coroutine[Any, Any, str]]
"""Returns a Prometheus text, or raises EngineError."""
DEADLINE = 10.0
"""Seconds for the whole of an answer, from the name's look-up to the last byte: a busy server answers late."""
LONGEST_TEXT = 16 * 2**20
"""Bytes of an answer at most. A real /metrics has some hundred kilobytes."""


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


def from_server(url: str, deadline: float = DEADLINE) -> Source:
    """Return a source that asks ``url`` (of /metrics) and gives up after ``deadline`` seconds."""

    async def fetch() -> str:
        try:
            async with asyncio.timeout(deadline):
                return (await _body(url, deadline)).decode("utf-8", "replace")
        except TimeoutError as error:
            raise EngineError(f"{url} cannot be read: no whole answer within {deadline:g} seconds") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise EngineError(f"{url} cannot be read: {_reason(error)}") from error

    return fetch


async def _body(url: str, deadline: float) -> bytes:
    headers = {"Accept": "text/plain", "Accept-Encoding": "identity"}
    text = bytearray()
    async with (
        httpx.AsyncClient(timeout=deadline, follow_redirects=True) as client,
        client.stream("GET", url, headers=headers) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"{url} cannot be read: HTTP {answer.status_code} {answer.reason_phrase}".rstrip())
        async for piece in answer.aiter_raw():
            text += piece
            if len(text) > LONGEST_TEXT:
                raise EngineError(f"{url} is longer than {LONGEST_TEXT >> 20} MiB: that is not a server's /metrics")
    return bytes(text)


def _reason(error: BaseException) -> str:
    """Return the operating system's own words if it refused: httpx says "All connection attempts failed"."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionError) and cause.errno:
            return os.strerror(cause.errno)
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


async def from_this_process() -> str:
    """Return the metrics of the server in whose process this runs, its workers' among them."""
    return await asyncio.to_thread(_collect)


def _collect() -> str:
    # Imported late: see reading.read.
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(REGISTRY).decode()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()
