"""What a request may ask of the backend: ``SamplingParams.extra_args``, over HTTP ``vllm_xargs``.

``budget_tokens``: tokens attended per layer, in the mean, and decode step instead of the configuration's
(`Batch.budgets`), a whole number of tokens, at least 1.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BUDGET = "budget_tokens"
BODY_CHECK = f"{__name__}.BodyCheck"
"""Class path for vLLM's ``--middleware``."""
_EVERYTHING = 2**31 - 1  # tokens; more would not fit the kernels' numbers


def asked_budget(params: Any) -> int:
    """Return the tokens that a request's parameters ask for; 0 if they name no budget, as those of pooling never do.

    Raises:
        ValueError: the budget is no number of tokens.
    """
    return budget_of(getattr(params, "extra_args", None))


def budget_of(extra_args: Any) -> int:
    """Return the tokens that ``budget_tokens`` of a mapping asks for; 0 if the mapping names no budget.

    Raises:
        ValueError: the budget is no number of tokens.
    """
    value = extra_args.get(BUDGET) if isinstance(extra_args, dict) else None
    if value is None:
        return 0
    # JSON does not tell integers from floats: some clients write 2048.0.
    tokens = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"{BUDGET}: got {value!r}, expected a whole number of tokens, 1 or more, such as 2048")
    return min(tokens, _EVERYTHING)


def check_asked(*request: Any, **named: Any) -> None:
    """Check the arguments of a platform's ``validate_request``, which differ between versions of vLLM.

    Raises:
        VLLMValidationError: `asked_budget` refuses the parameters; the server answers with status 400.
    """
    from vllm.exceptions import VLLMValidationError

    for argument in (*request, *named.values()):
        try:
            asked_budget(argument)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=BUDGET) from None


def check_bodies(parser: Any) -> None:
    """Make `BodyCheck` a default of the server's ``--middleware``, beside which users' own are added.

    Args:
        parser: the parser that vLLM hands to a platform; None, or one without ``--middleware``, outside of a server.
    """
    if parser is not None and parser.get_default("middleware") is not None:
        parser.set_defaults(middleware=[BODY_CHECK, *parser.get_default("middleware")])


class BodyCheck:
    """ASGI middleware that answers a wrong budget with status 400, before vLLM's server sees the request.

    ``validate_request`` comes too late for a streamed answer, whose status 200 is sent before; and vLLM's parser of
    requests turns ``true`` into 1.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        await self._app(scope, _checked(receive) if is_post else receive, send)


def _checked(receive: Receive) -> Receive:
    """Wrap ``receive`` so that it raises when the whole body is there and names a wrong budget."""
    body = bytearray()

    async def received() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                _check_body(body)
                body.clear()
        return message

    return received


def _check_body(body: bytearray) -> None:
    """Raise HTTPException, which FastAPI passes on from a middleware, if the JSON in ``body`` names a wrong budget."""
    if BUDGET.encode() not in body:
        return
    from fastapi import HTTPException

    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return  # The server says what is wrong with its JSON.
    try:
        budget_of(request.get("vllm_xargs") if isinstance(request, dict) else None)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
