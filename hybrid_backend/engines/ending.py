"""An HTTP server that was told to end, and is answering what it has begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_backend.engines.lifecycle import is_ending

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class RefuseWhileEnding:
    """ASGI middleware: after `hybrid serve` got its first signal, new requests are answered with status 503, upon
    which clients try again elsewhere. Else a server under load would never have answered all of them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and is_ending():
            from starlette.responses import JSONResponse

            error = {"message": "the server is ending", "type": "ServiceUnavailableError", "code": 503}
            await JSONResponse({"error": error}, 503, {"Retry-After": "1"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)
