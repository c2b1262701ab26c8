"""Budget that a request names for itself: ``budget_tokens`` in ``SamplingParams.extra_args``, over HTTP ``vllm_xargs``.

It is a whole number of tokens, at least 1: tokens attended per decode step, in the mean over the sparse layers,
instead of the configuration's budget (`Batch.budgets`).
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import shorten
from typing import Any

BUDGET = "budget_tokens"
MIDDLEWARE = "hybrid_backend.engines.vllm.middleware.Middleware"
"""Class path for vLLM's ``--middleware``."""
_NEAR = 0.8
"""Similarity to `BUDGET` from which a name counts as misspelt."""
_MAX_BUDGET = 2**31 - 1
"""Largest budget in tokens that fits the kernels' integers."""


def requested_budget(params: Any) -> int:
    """Return the budget in tokens that sampling parameters name; 0 if they name none, as those of pooling.

    Raises:
        ValueError: the budget is no number of tokens.
    """
    return budget_of(getattr(params, "extra_args", None))


def budget_of(extra_args: Any) -> int:
    """Return the budget in tokens that extra arguments name; 0 if they name none.

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
    return min(tokens, _MAX_BUDGET)


def check_names(names: Iterable[Any]) -> None:
    """Refuse a name that is nearly `BUDGET`. All other names belong to others.

    Raises:
        ValueError: a name is a misspelt `BUDGET`, which would be ignored.
    """
    for name in names:
        if isinstance(name, str) and name != BUDGET and get_close_matches(name.lower(), [BUDGET], cutoff=_NEAR):
            raise ValueError(f"{shorten(name, 60)}: no such key; did you mean {BUDGET}?")


def check_budgets(*arguments: Any, **keywords: Any) -> None:
    """Check the budgets in the arguments of a platform's ``validate_request``, which differ between versions of vLLM.

    Raises:
        VLLMValidationError: a budget is no number of tokens, or misspelt; the server answers with status 400.
    """
    from vllm.exceptions import VLLMValidationError

    for argument in (*arguments, *keywords.values()):
        try:
            requested_budget(argument)
            check_names(getattr(argument, "extra_args", None) or ())
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=BUDGET) from None


def add_middleware(parser: Any) -> None:
    """Make `Middleware` a default of the server's ``--middleware``, to which users' own are added.

    Args:
        parser: the parser that vLLM hands to a platform; None, or one without ``--middleware``, outside of a server.
    """
    if parser is not None and parser.get_default("middleware") is not None:
        parser.set_defaults(middleware=[MIDDLEWARE, *parser.get_default("middleware")])
