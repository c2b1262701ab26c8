"""The rules from measurements to keys."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.config import HybridConfig
from hybrid_backend.tools.profile.measure import LayerMeasure
from hybrid_backend.tools.profile.summary import (
    INTERVALS,
    KLSearch,
    chosen_intervals,
    exact_count,
    longest_interval,
    own_count,
    summarise,
)

FREE = KLSearch({}, ({},))


def layer(index: int, ratios: dict[int, float], cosine: float | None = 0.95, mass: float = 0.9) -> LayerMeasure:
    return LayerMeasure(layer=index, cosine=cosine, mass=mass, ratios=ratios, similarity=(0.8,))


def shares(short: float, long: float) -> dict[int, float]:
    return {1: short, 8: long}


def test_an_interval_must_hold_on_every_window_and_its_ratio_is_the_mean() -> None:
    windows = [[layer(3, shares(0.05, 0.10))], [layer(3, shares(0.07, 0.14))]]
    (found,) = summarise(windows, 0.9, tau=0.12, exact=FREE)
    assert (found.interval, found.below) == (1, True)
    assert found.ratio == pytest.approx(0.06)
    assert summarise(windows, 0.9, tau=0.15, exact=FREE)[0].interval == 8


def test_a_layer_whose_sparsity_changes_answers_is_exact_whatever_mass_it_covers() -> None:
    alone = {"text": {0: 0.001, 1: 0.0001, 2: 0.04}, "lookups": {0: 0.0, 1: 0.3, 2: 0.01}}
    exact = KLSearch(alone, ({"text": 0.05, "lookups": 0.4}, {"text": 0.05, "lookups": 0.02}))
    window = [layer(i, shares(0, 0), mass=0.99 if i else 0.5) for i in range(3)]
    found = summarise([window], 0.9, 0.12, exact)
    assert (exact.ranking, exact.chosen) == ([1, 2, 0], [1])
    assert [x.is_exact for x in found] == [False, True, False]
    assert found[1].kl == {"text": 0.0001, "lookups": 0.3}


@pytest.mark.parametrize(
    ("lookups", "count"),
    [
        ([0.3, 0.04, 0.03, 0.02], 1),  # low enough, and no layer stands out
        ([0.3, 0.04, 0.01, 0.009], 2),  # the second one costs three quarters of what is left
        ([0.3, 0.04, 0.01, 0.001, 0.0], 3),  # below a tenth of the limit nobody asks
        ([0.3, 0.1], None),
        ([0.3, 0.04], None),  # whether the next one stands out is not known
        ([0.3, 0.2, 0.2, 0.1, 0.04, 0.0], 5),
    ],
)
def test_a_layer_that_costs_more_than_half_of_what_is_left_is_exact(lookups: list[float], count: int | None) -> None:
    together = [{"text": 0.001, "lookups": kl} for kl in lookups]
    assert exact_count(together, 0.05, outliers=True) == count
    within = next((i for i, kl in enumerate(lookups) if kl <= 0.05), None)
    assert exact_count(together, 0.05, outliers=False) == within  # as `quality.max_kl` has it


@pytest.mark.parametrize(("limit", "chosen"), [(0.5, [1]), (0.2, [1, 2]), (0.01, [0, 1, 2])])
def test_layers_leave_in_the_order_of_their_kl_until_the_rule_is_kept_or_none_is_left(
    limit: float, chosen: list[int]
) -> None:
    search = KLSearch({"text": {0: 0.0, 1: 0.3, 2: 0.01}, "lookups": {0: 0.0, 1: 0.0, 2: 0.1}})
    calls: list[tuple[int, ...]] = []

    def measure(sets: list[tuple[int, ...]]) -> dict[str, list[float]]:
        calls.extend(sets)
        return {"text": [0.02] * len(sets), "lookups": [{3: 1.0, 2: 0.4, 1: 0.1, 0: 0.02}[len(x)] for x in sets]}

    found = search.complete(partial(exact_count, max_kl=limit, outliers=False), measure)
    assert calls == [(0, 1, 2), (0, 2), (0,), ()]
    assert found.chosen == chosen and len(found.together) == len(chosen) + 1


def test_as_few_layers_as_bring_all_kinds_near_what_true_queries_cost_select_by_their_own() -> None:
    true = {"text": 0.005, "lookups": 0.002}
    together = [
        {"text": 0.0055, "lookups": 0.129},
        {"text": 0.0055, "lookups": 0.0031},
        {"text": 0.005, "lookups": 0.002},
    ]
    assert own_count(together, true, max_kl=0.0) == 2
    assert own_count(together, true, max_kl=0.05) == 1  # below a tenth of the limit nobody asks
    assert own_count(together[:1], true, max_kl=0.0) is None  # more must be measured
    assert own_count(together[2:], true, max_kl=0.0) == 0


def test_a_layer_that_is_predicted_badly_is_sparse_by_its_own_query() -> None:
    window = [layer(i, shares(0, 0), cosine=cosine) for i, cosine in enumerate((None, 0.2, 0.95))]
    found = summarise([window], 0.9, 0.12, FREE)
    assert [(x.is_predicted, x.is_exact) for x in found] == [(False, False), (False, False), (True, False)]


def test_layers_that_were_not_measured_keep_their_interval() -> None:
    chosen = summarise([[layer(1, shares(0.05, 0.10))]], 0.9, 0.12, FREE)
    assert chosen_intervals(chosen, 3, HybridConfig()) == (8, 8, 8)
    given = HybridConfig.model_validate({"recall": {"intervals": [5, 6, 7]}})
    assert chosen_intervals(chosen, 3, given) == (5, 8, 7)


# --- recall intervals ---

share = st.floats(0, 1)
window = st.fixed_dictionaries({interval: share for interval in INTERVALS[:6]})
some_ratios = st.lists(window, min_size=1, max_size=4)


@given(some_ratios, share)
def test_the_interval_stays_below_tau_on_every_window_and_no_longer_one_does(
    ratios: list[dict[int, float]], tau: float
) -> None:
    interval, below = longest_interval(ratios, tau)
    assert below == any(all(w[i] < tau for w in ratios) for i in ratios[0])
    if below:
        assert all(w[interval] < tau for w in ratios)
    longer = [i for i in ratios[0] if i > interval]
    assert not any(all(w[i] < tau for w in ratios) for i in longer)


@given(some_ratios, share, share)
def test_a_larger_tau_never_shortens_the_interval(ratios: list[dict[int, float]], one: float, other: float) -> None:
    low, below = longest_interval(ratios, min(one, other))
    high, _ = longest_interval(ratios, max(one, other))
    assert not below or high >= low


@given(some_ratios)
def test_where_nothing_stays_below_the_best_interval_is_taken_and_said_so(ratios: list[dict[int, float]]) -> None:
    interval, below = longest_interval(ratios, 0.0)
    assert not below
    assert max(w[interval] for w in ratios) == min(max(w[i] for w in ratios) for i in ratios[0])
