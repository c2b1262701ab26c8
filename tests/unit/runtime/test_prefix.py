"""What a prompt finds in the pages of another request, which may be filled in the very step in which it begins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.harness import METHODS, PAGE, Engine, config, spec

EXACT: dict[str, dict[str, Any]] = {
    **METHODS,
    "scout, torch": {"device_kernels": "torch"},
    "headinfer, resident": {"method": "headinfer", "headinfer": {"resident_heads": ["0:0", "1:1"]}},
}


@pytest.mark.parametrize("keys", EXACT.values(), ids=EXACT)
def test_a_prompt_may_begin_with_a_page_that_another_request_fills_in_the_same_step(keys: dict[str, Any]) -> None:
    """vLLM puts a page into the prefix cache when its last token is scheduled."""
    engine = Engine(config(**keys), spec(windows=(None, 2 * PAGE, None)) if keys.get("method") == "scout" else spec())
    try:
        engine.add("a", 2 * PAGE - 1)
        engine.prefill("a")
        found = engine.add("b", 2 * PAGE + 5, shared_with="a", filling=True)
        assert found.tokens == 2 * PAGE and len(found.kv[0]) == 2 * PAGE - 1
        engine.step({"a": 1, "b": 5})
        engine.step({"a": 1, "b": 1})
    finally:
        engine.close()


@pytest.mark.parametrize(("tokens", "shares"), [(2 * PAGE - 1, True), (2 * PAGE - 2, False)])
def test_prompts_wait_for_decoding_rows_only_where_one_fills_a_page(tokens: int, shares: bool) -> None:
    engine = Engine(config(), spec())
    try:
        engine.add("a", tokens)
        engine.prefill("a")
        engine.add("b", 3 * PAGE)
        engine.step({"b": PAGE})
        engine.step({"a": 1, "b": PAGE})
        assert engine.ran.fills_prefix is shares
    finally:
        engine.close()
