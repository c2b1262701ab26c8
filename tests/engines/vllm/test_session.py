"""The way from vLLM's forward to the runtime, when the forward raises."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hybrid_backend.engines.vllm.session import Session
from tests.support.harness import PAGE, Engine, config, spec

pytestmark = pytest.mark.engine


def test_a_forward_that_raised_abandons_its_step() -> None:
    """Its CPU jobs are given up and the step is not ended as if all layers had run; the next one is exact."""
    engine = Engine(config(tiers="separate", sparse="never", frames_per_request=4), spec(layers=3))
    session = Session.__new__(Session)  # of an engine that is this test
    session.runtime, session._step = engine.runtime, None
    abandoned, method = [], engine.runtime.method
    method.abandon = abandoned.append  # type: ignore[method-assign]
    try:
        engine.add("a", 12 * PAGE)
        engine.prefill("a")
        with pytest.raises(ZeroDivisionError), session.scheduled():
            session._step, _ = engine._begin({"a": 1})
            _ = 1 / 0
        assert session._step is not None and abandoned == [session._step] and engine.runtime._open is None
        assert not session.is_scheduled
        engine.step({"a": 1})
        assert len(abandoned) == 1
    finally:
        engine.close()
