"""What several windows together decide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_backend.config import HybridConfig
from hybrid_backend.tools.profile.measure import LayerMeasure
from hybrid_backend.tools.profile.recall import NEVER
from hybrid_backend.tools.profile.summary import (
    SparsityKL,
    Thresholds,
    check,
    chosen_intervals,
    fewest_frames,
    summarise,
)

LIMITS = Thresholds(cosine=0.9, mass=0.8)
FREE = SparsityKL({}, ({},))


def layer(
    index: int, ratios: dict[int, dict[int, float]], cosine: float | None = 0.95, mass: float = 0.9
) -> LayerMeasure:
    return LayerMeasure(
        layer=index,
        cosine=cosine,
        cosine_heads=(),
        mass=mass,
        mass_true=mass,
        mass_best=mass,
        ratios=ratios,
        curves={},
        tokens90=(0.1, 0.3),
        tokens95=(0.2, 0.4),
        similarity=(0.8,),
    )


def shares(short: float, long: float) -> dict[int, float]:
    return {NEVER: 0.5, 1: short, 8: long}


def test_an_interval_must_hold_on_every_window_and_its_ratio_is_the_mean() -> None:
    windows = [[layer(3, {10: shares(0.05, 0.10)})], [layer(3, {10: shares(0.07, 0.14)})]]
    (found,) = summarise(windows, LIMITS, tau=0.12, frames=10, sparsity_kl=FREE)
    assert (found.interval, found.below) == (1, True)
    assert found.ratio == pytest.approx(0.06)
    assert found.tokens90 == pytest.approx(0.2)
    assert summarise(windows, LIMITS, tau=0.15, frames=10, sparsity_kl=FREE)[0].interval == 8


def test_the_fewest_frames_are_those_with_which_every_sparse_layer_holds() -> None:
    good, bad = shares(0.05, 0.10), shares(0.30, 0.40)
    sparse = [layer(0, {10: good, 15: good, 20: good}), layer(1, {10: bad, 15: bad, 20: good})]
    assert fewest_frames([sparse], LIMITS, tau=0.12, sparsity_kl=FREE) == 20
    assert fewest_frames([sparse], LIMITS, tau=0.01, sparsity_kl=FREE) is None
    exact = [sparse[0], layer(1, {10: bad, 15: bad, 20: bad}, mass=0.5)]
    assert fewest_frames([exact], LIMITS, tau=0.12, sparsity_kl=FREE) == 10  # an exact layer never recalls


def test_the_check_looks_up_what_was_chosen_in_other_windows() -> None:
    exact = layer(1, {10: shares(0, 0)}, mass=0.2)
    chosen = summarise([[layer(0, {10: shares(0.05, 0.10)}), exact]], LIMITS, 0.12, 10, FREE)
    unseen = [[layer(0, {10: shares(0.06, 0.13)}), exact]]
    (found,) = check(unseen, chosen, 0.12, 10)
    assert (found.layer, found.interval, found.profiled, found.ratio, found.holds) == (0, 8, 0.1, 0.13, False)


def test_a_layer_whose_sparsity_changes_answers_is_exact_whatever_mass_it_covers() -> None:
    alone = {"text": {0: 0.001, 1: 0.0001, 2: 0.04}, "lookups": {0: 0.0, 1: 0.3, 2: 0.01}}
    sparsity_kl = SparsityKL(alone, ({"text": 0.05, "lookups": 0.4}, {"text": 0.05, "lookups": 0.02}))
    window = [layer(i, {10: shares(0, 0)}, mass=0.99 if i else 0.5) for i in range(3)]
    found = summarise([window], LIMITS, 0.12, 10, sparsity_kl)
    assert (sparsity_kl.ranking, sparsity_kl.exact) == ([1, 2, 0], [1])
    assert [x.why for x in found] == [("mass",), ("KL",), ()]
    assert found[1].kl == {"text": 0.0001, "lookups": 0.3}


@pytest.mark.parametrize(
    ("lookups", "count"),
    [
        ([0.3, 0.04, 0.03, 0.02], 1),  # low enough, and no layer stands out
        ([0.3, 0.04, 0.01, 0.009], 2),  # the second one costs three quarters of what is left
        ([0.3, 0.04, 0.01, 0.001, 0.0], 3),  # below a tenth of the limit nobody asks
        ([0.3, 0.1], None),
        ([0.3, 0.04], None),  # whether the next one stands out is not known
        ([0.3, 0.2, 0.2, 0.1, 0.04, 0.0], 5),  # all of them: there is no next one
    ],
)
def test_a_layer_that_costs_more_than_half_of_what_is_left_is_exact(lookups: list[float], count: int | None) -> None:
    together = [{"text": 0.001, "lookups": kl} for kl in lookups]
    sparsity_kl = SparsityKL({"text": dict.fromkeys(range(5), 0.0)}, together)
    assert sparsity_kl.exact_count(LIMITS) == count
    within = next((i for i, kl in enumerate(lookups) if kl <= LIMITS.kl), None)
    assert sparsity_kl.exact_count(replace(LIMITS, outliers=False)) == within  # as `quality.max_kl` has it


def test_a_layer_that_is_predicted_badly_is_sparse_by_its_own_query() -> None:
    window = [layer(i, {10: shares(0, 0)}, cosine=cosine) for i, cosine in enumerate((None, 0.2, 0.95))]
    found = summarise([window], LIMITS, 0.12, 10, FREE)
    assert [(x.predicted, x.why) for x in found] == [(False, ()), (False, ()), (True, ())]


def test_layers_that_were_not_measured_keep_their_interval() -> None:
    chosen = summarise([[layer(1, {10: shares(0.05, 0.10)})]], LIMITS, 0.12, 10, FREE)
    assert chosen_intervals(chosen, 3, HybridConfig()) == (8, 8, 8)
    given = HybridConfig.model_validate({"recall": {"intervals": [5, 6, 7]}})
    assert chosen_intervals(chosen, 3, given) == (5, 8, 7)
