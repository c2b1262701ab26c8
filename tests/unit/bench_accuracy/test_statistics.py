"""Intervals against published values and by simulation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.tools.bench.accuracy.statistics import bootstrap, wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score without continuity correction).
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_equals_published_intervals(right: int, n: int, low: float, high: float) -> None:
    found = wilson([1.0] * right + [0.0] * (n - right))
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert found.mean == pytest.approx(right / n) and found.n == n


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_wilson_holds_its_mean_and_is_never_a_point(values: list[float]) -> None:
    found = wilson(values)
    assert 0 <= found.low <= found.mean <= found.high <= 1 and found.low < found.high


def test_wilson_refuses_what_is_no_score() -> None:
    assert wilson([]) is None
    for values in ([1.2], [-0.1]):
        with pytest.raises(ValueError, match="values in"):
            wilson(values)


def test_the_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    draw, hits = random.Random(0), 0
    for trial in range(200):
        found = bootstrap([draw.gauss(1.0, 2.0) for _ in range(40)], seed=trial)
        hits += found.low <= 1.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
def test_the_bootstrap_holds_its_mean_and_is_the_same_each_time(values: list[float]) -> None:
    found = bootstrap(values)
    assert found.low <= found.mean <= found.high and found == bootstrap(values)


def test_the_bootstrap_leaves_out_what_is_missing() -> None:
    assert bootstrap([]) is bootstrap([None]) is None
    assert bootstrap([1.0, None, 2.0]) == bootstrap([1.0, 2.0])
