"""Requests that begin with pages of another request, which are filled in the very step in which they begin.

vLLM finds a page in its prefix cache from when the page's last token is scheduled, and calls a preempted request that
has one token left a decoding row.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.harness import METHODS, PAGE, Engine, config, spec

KEYS: dict[str, dict[str, Any]] = {
    **METHODS,
    "scout, torch": {"device_kernels": "torch"},
    "dense, torch": {"method": "dense", "device_kernels": "torch"},
    "headinfer, resident": {"method": "headinfer", "headinfer": {"resident_heads": ["0:0", "1:1"]}},
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_a_prompt_may_begin_with_a_page_that_another_request_fills_in_the_same_step(keys: dict[str, Any]) -> None:
    engine = Engine(config(**keys), spec(windows=(None, 2 * PAGE, None)) if keys.get("method") == "scout" else spec())
    engine.admit("a", 2 * PAGE - 1)
    request = engine.add("b", 2 * PAGE + 5, shared_with="a", filling=True)
    assert request.tokens == 2 * PAGE and len(request.kv[0]) == 2 * PAGE - 1
    engine.step({"a": 1, "b": 5})
    engine.decode("a", "b")


@pytest.mark.parametrize("filled_by", ["a prompt", "a decoding row"])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_a_request_may_go_on_with_pages_that_are_filled_in_the_same_step(keys: dict[str, Any], filled_by: str) -> None:
    """The request goes on with its last token."""
    engine = Engine(config(**keys), spec())
    first = engine.add("a", 2 * PAGE - 1)
    if filled_by == "a prompt":  # of which two tokens are left
        engine.step({"a": 2 * PAGE - 2})
        first.prompt += 1
    else:
        engine.prefill("a")
    engine.add_twin("b", "a", 2 * PAGE)
    engine.step({"a": 2 if filled_by == "a prompt" else 1, "b": 1})
    engine.decode("a", "b", steps=3)


@pytest.mark.parametrize(("tokens", "shares"), [(2 * PAGE - 1, True), (2 * PAGE - 2, False)])
def test_prompts_wait_for_decoding_rows_only_where_one_fills_a_page(tokens: int, shares: bool) -> None:
    engine = Engine(config(), spec())
    engine.admit("a", tokens)
    engine.add("b", 3 * PAGE)
    engine.step({"b": PAGE})
    engine.step({"a": 1, "b": PAGE})
    assert engine.ran.fills_prefix is shares
