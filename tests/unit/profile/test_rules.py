"""The rules from measurements to keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.tools.profile.summary import INTERVALS, longest_interval

shares = st.floats(0, 1)
window = st.fixed_dictionaries({interval: shares for interval in INTERVALS[:6]})
some_windows = st.lists(window, min_size=1, max_size=4)


@given(some_windows, shares)
def test_the_interval_stays_below_tau_on_every_window_and_no_longer_one_does(
    ratios: list[dict[int, float]], tau: float
) -> None:
    interval, below = longest_interval(ratios, tau)
    assert below == any(all(w[i] < tau for w in ratios) for i in ratios[0])
    if below:
        assert all(w[interval] < tau for w in ratios)
    longer = [i for i in ratios[0] if i > interval]
    assert not any(all(w[i] < tau for w in ratios) for i in longer)


@given(some_windows, shares, shares)
def test_a_larger_tau_never_shortens_the_interval(ratios: list[dict[int, float]], one: float, other: float) -> None:
    low, below = longest_interval(ratios, min(one, other))
    high, _ = longest_interval(ratios, max(one, other))
    assert not below or high >= low


@given(some_windows)
def test_where_nothing_stays_below_the_best_interval_is_taken_and_said_so(ratios: list[dict[int, float]]) -> None:
    interval, below = longest_interval(ratios, 0.0)
    assert not below
    assert max(w[interval] for w in ratios) == min(max(w[i] for w in ratios) for i in ratios[0])
