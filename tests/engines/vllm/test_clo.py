"""CLO on the real model: its caches hit about every other time, and what they hold is nearly what a fresh selection
would. The figures that were measured stand in docs/lab/measurements.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.clo import measure

pytestmark = pytest.mark.engine


def test_every_other_lookup_hits_and_costs_a_hundredth_of_the_mass_at_most(tmp_path: Path) -> None:
    """Predicted queries, all layers but the first, 1,536 tokens and more, a budget of 240; eta 1 selects afresh."""
    keys = {"budget_tokens": 240, "lookahead.enabled": True}
    fresh, cached = (measure(tmp_path, 1536, **keys, **{"clo.eta": eta}) for eta in (1.0, 0.8))
    assert fresh["hit_ratio"] == 0
    assert 0.4 < cached["hit_ratio"] < 0.65
    assert fresh["mass"] - cached["mass"] < 0.012
    assert cached["copied_mb"] < 0.65 * fresh["copied_mb"]
