"""What a request may ask of the backend: ``SamplingParams.extra_args``, over HTTP ``vllm_xargs``.

``budget_tokens``: tokens attended per layer, in the mean, and decode step instead of the configuration's
(`Batch.budgets`), a whole number of tokens, at least 1.
"""

from __future__ import annotations

from typing import Any

BUDGET = "budget_tokens"
MIDDLEWARE = "hybrid_backend.engines.vllm.middleware.Middleware"
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


def add_middleware(parser: Any) -> None:
    """Make `Middleware` a default of the server's ``--middleware``, beside which users' own are added.

    Args:
        parser: the parser that vLLM hands to a platform; None, or one without ``--middleware``, outside of a server.
    """
    if parser is not None and parser.get_default("middleware") is not None:
        parser.set_defaults(middleware=[MIDDLEWARE, *parser.get_default("middleware")])
