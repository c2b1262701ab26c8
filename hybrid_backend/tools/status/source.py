"""Sources of a Prometheus text: the address of a server, or the process of the server itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from hybrid_backend.errors import EngineError

Source = Callable[[], Coroutine[Any, Any, str]]
"""A function that returns a Prometheus text, or raises EngineError."""
DEADLINE = 10.0
"""Seconds for a whole answer, from the name's look-up to the last byte. A busy server answers late."""


def metrics_url(server: str) -> str:
    """Return ``http://host:port/metrics`` for a server's address as a user writes it.

    Raises:
        EngineError: the text is no address.
    """
    url = server.strip()
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        address = urlsplit(url)
        is_usable = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or any(c.isspace() for c in url):
        raise EngineError(f"{server!r} is not a server's address; write it as http://localhost:8000")
    path = address.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return urlunsplit((address.scheme, address.netloc, f"{path}/metrics", "", ""))


def from_server(url: str, deadline: float = DEADLINE) -> Source:
    """Return a source that reads ``url`` (of /metrics) and gives up after ``deadline`` seconds."""

    async def fetch() -> str:
        try:
            async with asyncio.timeout(deadline), httpx.AsyncClient(timeout=deadline, follow_redirects=True) as client:
                return (await client.get(url, headers={"Accept": "text/plain"})).raise_for_status().text
        except TimeoutError as error:
            raise EngineError(f"{url} cannot be read: no whole answer within {deadline:g} seconds") from error
        except httpx.HTTPStatusError as error:
            raise EngineError(f"{url} cannot be read: HTTP {error.response.status_code}") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise EngineError(f"{url} cannot be read: {str(error) or type(error).__name__}") from error

    return fetch


async def from_this_process() -> str:
    """Return the metrics of the server in whose process this runs, including its workers' metrics."""
    # Imported late: see `reading._samples`.
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return (await asyncio.to_thread(generate_latest, registry)).decode()
