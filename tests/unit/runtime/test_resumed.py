"""A request that goes on with its last token, in the step in which other rows fill the pages that it begins with.

vLLM finds a page in its prefix cache from when the page's last token is scheduled, and calls a preempted request that
has one token left a decoding row.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.harness import METHODS, PAGE, Engine, config, spec

SEPARATE: dict[str, Any] = {}
KEYS: dict[str, dict[str, Any]] = {
    **METHODS,
    "infinigen, separate": {"method": "infinigen", **SEPARATE},
    "clo, separate": {"method": "clo", **SEPARATE},
    "apex, separate": {"method": "apex", "apex": {"strategy": "lockstep"}, **SEPARATE},
    "hgca, separate": {"method": "hgca", **SEPARATE},
    "dense, torch": {"method": "dense", "device_kernels": "torch"},
}


@pytest.mark.parametrize("filled_by", ["a prompt", "a decoding row"])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_a_request_may_go_on_with_pages_that_are_filled_in_the_same_step(keys: dict[str, Any], filled_by: str) -> None:
    engine = Engine(config(**keys), spec())
    try:
        engine.add("a", 2 * PAGE - 1)
        if filled_by == "a prompt":  # of which two tokens are left
            engine.step({"a": 2 * PAGE - 2})
            engine.sequences["a"].prompt += 1
        else:
            engine.prefill("a")
        first = engine.sequences["a"]
        other = engine.add("b", 2 * PAGE)
        other.pages, other.tokens, other.donor = first.pages[:2], 2 * PAGE, first
        for page in other.pages:
            engine.refs[page] += 1
        engine.step({"a": 2 if filled_by == "a prompt" else 1, "b": 1})
        for _ in range(3):
            engine.step({"a": 1, "b": 1})
    finally:
        engine.close()
