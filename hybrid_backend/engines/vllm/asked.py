"""What a request may ask of the backend: ``SamplingParams.extra_args``, over HTTP ``vllm_xargs``.

``budget_tokens``: tokens attended per layer, in the mean, and decode step instead of the configuration's
(`Batch.budgets`), a whole number of tokens, at least 1.
"""

from __future__ import annotations

from typing import Any

BUDGET = "budget_tokens"
_EVERYTHING = 2**31 - 1  # tokens; more would not fit the kernels' numbers


def asked_budget(params: Any) -> int:
    """Tokens that the request's parameters ask for, 0: they do not (as those of a pooling model never do).

    Raises:
        ValueError: what is asked for is no number of tokens.
    """
    given = (getattr(params, "extra_args", None) or {}).get(BUDGET)
    if given is None:
        return 0
    tokens = int(given) if isinstance(given, float) and given.is_integer() else given  # JSON has no integers
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"{BUDGET}: got {given!r}, expected a whole number of tokens, 1 or more, such as 2048")
    return min(tokens, _EVERYTHING)


def check_asked(*request: Any, **named: Any) -> None:
    """What a platform's ``validate_request`` is given, which differs between versions of vLLM: the parameters among it.

    Raises:
        VLLMValidationError: what `asked_budget` refuses; the server answers with it and status 400.
    """
    from vllm.exceptions import VLLMValidationError

    for each in (*request, *named.values()):
        try:
            asked_budget(each)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=BUDGET) from None
