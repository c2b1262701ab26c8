"""The status page inside the engine's own server: an ASGI middleware that answers `/hybrid/status`, and only that.

Both engines take one without being changed: vLLM by its flag ``--middleware``, SGLang by ``add_middleware`` of its
application. A reading is taken when somebody looks, so that a page that nobody has open costs nothing.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from hybrid_backend.status.app import PATHS, application
from hybrid_backend.status.sampler import Sampler, from_this_process


class StatusMiddleware:
    """Answers the page's paths itself and hands everything else on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._page = application(Sampler(from_this_process, "this server's own metrics"), watching=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) in PATHS
        await (self._page if is_ours else self._app)(scope, receive, send)
