"""Requests with budgets of their own, beside others (docs/vllm.md); pages that are always attended, beyond a window."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.support.harness import PAGE, Engine, config, spec


@pytest.mark.parametrize("asked", [3, 10])
@pytest.mark.parametrize("method", ["quest", "scout", "infinigen"])
def test_a_request_attends_as_many_pages_as_it_asks_for(method: str, asked: int) -> None:
    keys = {"sparse": "always", "frames_per_request": 10, "lookahead": {"enabled": False}}
    engine = Engine(config(method=method, **keys), spec(), num_pages=200, is_witnessed=True)
    engine.add("a", 30 * PAGE).budget = asked * PAGE
    engine.prefill("a")
    for _ in range(20):
        engine.step({"a": 1}, tolerance=None)
        newest = (engine.sequences["a"].tokens - 1) % PAGE + 1
        for layer in range(engine.model.num_layers):
            tokens = engine.witness.of(layer, engine.ran, 0).tokens.sum(1)
            assert tokens.tolist() == [(asked - 1) * PAGE + newest] * engine.model.num_kv_heads
    engine.close()


def test_clo_does_not_heed_the_budget_of_a_request() -> None:
    """A head's frames are of the configuration's."""
    keys = {"method": "clo", "sparse": "always", "clo": {"persistent": "none"}}
    seen = []
    for asked in (0, 20):
        engine = Engine(config(**keys), spec(), num_pages=200, seed=3, is_witnessed=True)
        engine.add("a", 30 * PAGE).budget = asked * PAGE
        engine.prefill("a")
        for _ in range(5):
            engine.step({"a": 1}, tolerance=None)
        seen.append(engine.witness.of(0, engine.ran, 0).tokens.sum(1).tolist())
        engine.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("method", ["quest", "scout"])
def test_a_promise_is_not_judged_by_requests_with_budgets_of_their_own(method: str) -> None:
    keys = {
        "sparse": "always", "method": method, "quality": {"min_mass": 0.5}, "metrics": {"sample_interval": 1},
        "budget_tokens": 12 * PAGE, "frames_per_request": 28,
    }  # fmt: skip
    budgets = []
    for own in (0, PAGE):
        engine = Engine(config(**keys), spec(), num_pages=120)
        for name in "ab":
            engine.add(name, 30 * PAGE)
            engine.prefill(name)
        engine.sequences["b"].budget = own
        for _ in range(60):
            engine.step({"a": 1, "b": 1}, tolerance=None)
        budgets.append(engine.runtime.gauges()["hybrid_quality_budget_tokens"])
        engine.close()
    assert budgets[0] == budgets[1]


@pytest.mark.parametrize("method", ["quest", "scout"])
def test_a_promise_is_kept_after_a_request_whose_logits_were_no_numbers(method: str) -> None:
    keys = {"sparse": "always", "method": method, "quality": {"min_mass": 0.9}, "metrics": {"sample_interval": 1}}
    engine = Engine(config(**keys), spec(), num_pages=120)
    engine.add("bad", 20 * PAGE)
    engine.prefill("bad")
    for kv in engine.kv:
        kv[engine.sequences["bad"].pages[3], :, 0, 0, 0] = float("inf")
    with suppress(AssertionError):  # its answer is none
        engine.step({"bad": 1}, tolerance=None)
    engine.drop("bad")
    engine.add("a", 20 * PAGE)
    engine.prefill("a")
    for _ in range(30):
        engine.step({"a": 1}, tolerance=None)
    gauges = engine.runtime.gauges()
    engine.close()
    assert 0 < gauges["hybrid_quality_mass"] <= 1 and gauges["hybrid_quality_budget_tokens"] > 4 * PAGE


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_hgca_keeps_its_window_where_more_pages_are_recent_than_it_holds(kernel: str) -> None:
    keys = {
        "method": "hgca", "sinks": 3, "recent": 3, "budget_tokens": 8 * PAGE,
        "hgca": {"window_tokens": 2 * PAGE}, "exact_layers": [0, 1, 2], "workers": {"threads": 1, "kernel": kernel},
    }  # fmt: skip
    engine = Engine(config(**keys), spec())
    engine.add("a", 12 * PAGE)
    engine.prefill("a")
    engine.step({"a": 1})
    engine.close()
