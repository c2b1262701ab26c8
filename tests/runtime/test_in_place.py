"""Decoding in place: the second level of digests belongs to a request and goes with it."""

from __future__ import annotations

import pytest

from hybrid_backend.kernels import cpu
from tests.runtime.harness import PAGE, Engine, config, spec

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


def test_spans_of_a_request_go_with_it() -> None:
    cfg = config(
        tiers="unified",
        sparse="always",
        lookahead={"enabled": False},
        selection={"candidates": 1},
        metrics={"sample_interval": 1},
    )
    engine = Engine(cfg, spec(), num_pages=256)
    method = engine.runtime.method
    assert method.in_place is not None
    engine.add("long", 60 * PAGE)
    engine.prefill("long")
    engine.add("twin", 60 * PAGE + 5, shared_with="long")
    engine.prefill("twin")
    assert method.host_bytes == 0
    engine.step({"long": 1, "twin": 1}, tolerance=None)
    both = method.host_bytes
    assert both > 0
    engine.preempt("twin")
    assert 0 < method.host_bytes < both
    engine.prefill("twin")
    engine.step({"long": 1, "twin": 1}, tolerance=None)
    assert method.host_bytes == both
    engine.drop("long")
    engine.drop("twin")
    assert method.host_bytes == 0
    engine.close()
