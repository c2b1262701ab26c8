"""Middleware of an HTTP server that was told to end and still answers the requests in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_backend.engines.lifecycle import is_ending

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class RefuseWhileEnding:
    """ASGI middleware that answers new requests with status 503 after the first signal.

    Clients then try again elsewhere. Without it, a server under load would never have answered all requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and is_ending():
            from starlette.responses import JSONResponse

            error = {"message": "the server is ending", "type": "ServiceUnavailableError", "code": 503}
            await JSONResponse({"error": error}, 503, {"Retry-After": "1"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)
