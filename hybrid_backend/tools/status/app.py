"""Status page and its JSON over HTTP: in a separate server, or inside the engine's server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Annotated

from fastapi import FastAPI, Query, Response
from fastapi.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.status.model import Status
from hybrid_backend.tools.status.sampler import INTERVAL, Sampler
from hybrid_backend.tools.status.source import from_server, from_this_process, metrics_url

PAGE = "/hybrid/status"
_FILES = {"": "text/html", ".css": "text/css", ".js": "text/javascript"}
PATHS = frozenset({f"{PAGE}.json", *(PAGE + ending for ending in _FILES)})
_METHODS = ["GET", "HEAD"]  # A route of FastAPI answers HEAD only if it is told to.
# Nothing is loaded from elsewhere, no inline script runs, and no site frames the page.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def application(sampler: Sampler, watching: bool, tell: Callable[[str], None] = lambda _: None) -> FastAPI:
    """Return the page, its files and its JSON as an application. A request takes a fresh reading when one is due.

    Args:
        sampler: the server's history.
        watching: True to take readings also while no viewer asks.
        tell: gets each new problem of these readings, and a line when it is over.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(_watch(sampler, tell)) if watching else None
        yield
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = FastAPI(title="hybrid status", openapi_url=None, lifespan=lifespan, redirect_slashes=False)

    @app.api_route(f"{PAGE}.json", methods=_METHODS)
    async def status(response: Response, after: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Status:
        await sampler.refresh()
        response.headers.update(_HEADERS)
        return sampler.status(after)

    def add_file(ending: str, kind: str) -> None:
        content = (files("hybrid_backend.tools.status") / "page" / f"status{ending or '.html'}").read_bytes()
        answer = Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)
        app.add_api_route(PAGE + ending, lambda: answer, methods=_METHODS)

    for ending, kind in _FILES.items():
        add_file(ending, kind)
    return app


async def _watch(sampler: Sampler, tell: Callable[[str], None]) -> None:
    told: str | None = None
    while True:
        await sampler.refresh()
        if sampler.problem != told:
            told = sampler.problem
            tell(told or "the server answers")
        await asyncio.sleep(sampler.interval)


class StatusMiddleware:
    """The page inside the engine's own server: an ASGI middleware that answers the page's paths.

    Both engines take a middleware without being changed: vLLM by its flag ``--middleware``, SGLang by
    ``add_middleware`` of its application. A reading is taken on request, so a page that nobody has open costs nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._page = application(Sampler(from_this_process, "this server's own metrics"), watching=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) in PATHS
        await (self._page if is_ours else self._app)(scope, receive, send)


def serve(
    server: str,
    host: str,
    port: int,
    interval: float = INTERVAL,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve the page of a server until stopped.

    Args:
        server: the server's address.
        host: address that the page listens on.
        port: port of the page; 0 takes a free one.
        interval: seconds between two readings.
        tell: gets the page's address, and lines about a server that cannot be read.

    Raises:
        EngineError: an address cannot be used.
    """
    import uvicorn

    url = metrics_url(server)
    if not 0.2 <= interval <= 3600:
        raise EngineError(f"--interval {interval} is not between 0.2 and 3600 seconds")
    listener = _listen(host, port)
    app = application(Sampler(from_server(url), url, interval), watching=True, tell=tell)
    app.add_api_route("/", lambda: RedirectResponse(PAGE.lstrip("/"), status_code=307), methods=["GET"])
    shown = "localhost" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    tell(f"status of {url} on http://{shown}:{listener.getsockname()[1]}{PAGE}")
    with listener, suppress(KeyboardInterrupt):  # uvicorn raises KeyboardInterrupt again after its shutdown.
        uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        # Python adds the address in parentheses to the operating system's words.
        reason, hint = str(getattr(error, "strerror", error)), "give another address with --host, --port"
        raise EngineError(f"cannot listen on {host}:{port}: {reason.partition(' (')[0]}; {hint}") from error
