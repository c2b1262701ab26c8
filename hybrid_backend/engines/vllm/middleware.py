"""Middleware of vLLM's HTTP server: it checks budgets, and says when the server is ready and when it ends."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from fastapi import HTTPException

from hybrid_backend.engines.ending import RefuseWhileEnding
from hybrid_backend.engines.lifecycle import is_served, served_address
from hybrid_backend.engines.vllm.request_budget import BUDGET, budget_of, check_names

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger("vllm.hybrid_backend")


class Middleware(RefuseWhileEnding):
    """ASGI middleware of a server.

    * A wrong budget is answered with status 400 before vLLM sees the request: ``validate_request`` comes too late for
      a streamed answer, whose status 200 is sent before, and vLLM's parser of requests turns ``true`` into 1.
    * When `hybrid serve` is ready, a line of the log says so; when it ends, new requests are refused.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and is_served():
            send = _announced(send)
        elif scope["type"] == "http" and scope["method"] == "POST":
            receive = _checked(receive)
        await super().__call__(scope, receive, send)


def _announced(send: Send) -> Send:
    """Wrap ``send`` so that the log says when the application has started."""

    async def announce(message: Message) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            logger.info(
                "hybrid backend: ready for requests on %s; watch it with: hybrid top %s; "
                "Ctrl-C or SIGTERM ends it after those in flight",
                served_address(),
                served_address(),
            )

    return announce


def _checked(receive: Receive) -> Receive:
    """Wrap ``receive`` so that it raises when the whole body has arrived and names a wrong budget."""
    body = bytearray()

    async def check() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                _check_body(body)
                body.clear()
        return message

    return check


def _check_body(body: bytearray) -> None:
    """Raise HTTPException if the JSON in ``body`` names a wrong or a misspelt budget, or names one in a wrong place.

    FastAPI turns an HTTPException from a middleware into an answer.
    """
    if b"vllm_xargs" not in body and b"budget" not in body.lower():
        return
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return  # vLLM answers a request with invalid JSON.
    if not isinstance(request, dict):
        return
    if BUDGET in request:
        example = json.dumps({"vllm_xargs": {BUDGET: 2048}})
        raise HTTPException(400, f"{BUDGET}: a request names its budget in vllm_xargs, as {example}")
    arguments = request.get("vllm_xargs")
    try:
        budget_of(arguments)
        check_names([*request, *(arguments if isinstance(arguments, dict) else ())])
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
