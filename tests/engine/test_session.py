"""The way from vLLM's forward to the runtime, when the forward raises."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hybrid_backend.engines.vllm.session import Session
from hybrid_backend.methods.selective import StepPlan
from tests.runtime.harness import PAGE, Engine, config, spec

pytestmark = pytest.mark.engine


def test_a_forward_that_raised_abandons_its_step() -> None:
    """Its CPU jobs are given up and the step is not ended as if all layers had run; the next one is exact."""
    engine = Engine(config(tiers="separate", sparse="never", slots_per_request=4), spec(layers=3))
    session = Session.__new__(Session)  # of an engine that is this test
    session.runtime, session._step = engine.runtime, None
    ended, abandoned, method = [], [], engine.runtime.method
    end, abandon = method.end_step, method.abandon
    method.end_step = lambda step: (ended.append(step), end(step))  # type: ignore[method-assign, assignment]
    method.abandon = lambda step: (abandoned.append(step), abandon(step))  # type: ignore[method-assign, assignment]
    try:
        engine.add("a", 12 * PAGE)
        engine.prefill("a")
        ended.clear()
        with pytest.raises(ZeroDivisionError), session.scheduled():
            session._step, _ = engine._begin({"a": 1})
            _ = 1 / 0
        assert session._step is not None and isinstance(session._step.plan, StepPlan)
        assert abandoned == [session._step] and not ended and engine.runtime._open is None
        assert not session.is_scheduled
        engine.step({"a": 1})
        assert len(ended) == 1
    finally:
        engine.close()
