"""The page and its JSON as a FastAPI application: `/hybrid/status` and `/hybrid/status.json`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Response
from fastapi.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hybrid_backend.tools.status.model import Status
from hybrid_backend.tools.status.sampler import Sampler
from hybrid_backend.tools.status.source import from_this_process

PAGE = "/hybrid/status"
_FILES = {"": "text/html", ".css": "text/css", ".js": "text/javascript", "-plots.js": "text/javascript"}
PATHS = frozenset({"/hybrid", "/hybrid/", f"{PAGE}/", f"{PAGE}.json", *(PAGE + ending for ending in _FILES)})
_METHODS = ["GET", "HEAD"]  # A route of FastAPI answers HEAD only if it is told to.
# Nothing is loaded from elsewhere, nothing inline is run, nobody frames the page.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def router(sampler: Sampler) -> APIRouter:
    """The page, its files and its JSON. A request takes a fresh reading when one is due."""
    routes = APIRouter(include_in_schema=False)

    @routes.api_route(f"{PAGE}.json", methods=_METHODS)
    async def status(
        response: Response,
        after: Annotated[float, Query(ge=0, allow_inf_nan=False, description="time of the client's last column")] = 0.0,
    ) -> Status:
        await sampler.refresh()
        response.headers.update(_HEADERS)
        return sampler.status(after)

    for ending, kind in _FILES.items():
        routes.add_api_route(PAGE + ending, _file(f"status{ending or '.html'}", kind), methods=_METHODS)
    # Relative, so that it holds behind a proxy that adds a prefix.
    for path, target in (("/hybrid", "hybrid/status"), ("/hybrid/", "status"), (f"{PAGE}/", "../status")):
        routes.add_api_route(path, _redirect(target), methods=_METHODS)
    return routes


def application(sampler: Sampler, watching: bool) -> FastAPI:
    """The page as an application of its own; ``watching``: it takes readings also while nobody looks."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(_watch(sampler)) if watching else None
        yield
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = FastAPI(title="hybrid status", openapi_url=None, lifespan=lifespan, redirect_slashes=False)
    app.include_router(router(sampler))
    return app


class StatusMiddleware:
    """The page inside the engine's own server: answers the page's paths itself and hands everything else on.

    Both engines take an ASGI middleware without being changed: vLLM by its flag ``--middleware``, SGLang by
    ``add_middleware`` of its application. A reading is taken when somebody looks, so that a page that nobody has open
    costs nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._page = application(Sampler(from_this_process, "this server's own metrics"), watching=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) in PATHS
        await (self._page if is_ours else self._app)(scope, receive, send)


async def _watch(sampler: Sampler) -> None:
    while True:
        await sampler.refresh()
        await asyncio.sleep(sampler.interval)


def _file(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = (files("hybrid_backend.tools.status") / "page" / name).read_bytes()

    async def answer() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

    return answer


def _redirect(target: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return RedirectResponse(target, status_code=307)

    return answer
