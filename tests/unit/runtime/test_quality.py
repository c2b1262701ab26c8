"""`quality.min_mass`: the budget follows the sampled attention mass (`step.quality`)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.batch import DecodeRows
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods import resolve_method
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step.quality import QualityWatch, watch
from tests.support.harness import PAGE, Engine, config, spec

LAYERS, MOST = (1, 2), 64


def made(min_mass: float, **keys: object) -> tuple[QualityWatch, Stats]:
    stats = Stats.of(3)
    chosen = config(quality={"min_mass": min_mass}, metrics={"sample_interval": 4}, **keys)
    found = watch(chosen, stats, LAYERS, MOST)
    assert found is not None
    return found, stats


def sample(stats: Stats, mass: float) -> None:
    for layer in LAYERS:
        stats.layers[layer].mass_sum += mass
        stats.layers[layer].mass_samples += 1


def rows_of(pages: int, asked: int | None = None) -> DecodeRows:
    one, budgets = torch.tensor([pages]), None if asked is None else torch.tensor([asked])
    starts, table = torch.arange(2, dtype=torch.int32), torch.zeros(1, pages)
    return DecodeRows(["a"], starts, torch.zeros(1), PAGE * one, one, table, whole_batch=True, budgets=budgets)


def budget(found: QualityWatch, pages: int = 100) -> int:
    return int(found.budgets(torch.tensor([min(4, pages)]), rows_of(pages))[0])


def test_nothing_is_watched_where_nothing_is_promised() -> None:
    assert watch(HybridConfig(), Stats.of(3), LAYERS, MOST) is None
    assert watch(config(quality={"min_mass": 0.9}), Stats.of(3), (), MOST) is None


@given(
    min_mass=st.floats(0.01, 1.0),
    masses=st.lists(st.floats(0.0, 1.0), max_size=60),
    pages=st.integers(1, 200),
)
def test_budgets_stay_between_what_is_always_attended_and_all(min_mass: float, masses: list[float], pages: int) -> None:
    found, stats = made(min_mass)
    for mass in masses:
        sample(stats, mass)
        assert 3 <= found.budget <= MOST
        chosen = budget(found, pages)
        assert chosen == (pages if found.is_dense or pages <= 4 else min(pages, found.budget))


@pytest.mark.parametrize("enough", [5, 17, 40, 64])
def test_a_budget_settles_where_the_promise_is_kept(enough: int) -> None:
    """A model of which a budget of ``enough`` pages keeps exactly what is promised."""
    found, stats = made(0.98)
    for _ in range(60):
        sample(stats, max(0.0, 1 - 0.02 * enough / found.budget))
        budget(found)
    assert enough <= found.budget <= 2.2 * enough and not found.is_dense
    assert found.gauges()["hybrid_quality_mass"] >= 0.98 - 1e-9


def test_where_no_budget_suffices_everything_is_attended_for_a_while_and_then_tried_again() -> None:
    found, stats = made(0.98)
    while not found.is_dense:
        sample(stats, 0.5)
        assert budget(found) <= 100
    assert math.isinf(found.gauges()["hybrid_quality_budget_tokens"])
    assert [budget(found) for _ in range(4 * 4)] == [100] * 15 + [MOST]  # the first was the one that found out
    sample(stats, 0.985)
    assert budget(found) == MOST and not found.is_dense


def test_rows_that_fit_keep_all_of_their_pages() -> None:
    found, _ = made(0.9)
    found.budget = 3
    assert int(found.budgets(torch.tensor([7]), rows_of(7))) == 7
    assert int(found.budgets(torch.tensor([4]), rows_of(9))) == 3


def test_a_request_that_asked_for_a_budget_of_its_own_keeps_it() -> None:
    found, stats = made(0.98)
    assert int(found.budgets(torch.tensor([5]), rows_of(100, asked=5 * PAGE))) == 5
    while not found.is_dense:
        sample(stats, 0.5)
        found.budgets(torch.tensor([4]), rows_of(100, asked=0))
    assert int(found.budgets(torch.tensor([5]), rows_of(100, asked=5 * PAGE))) == 5
    assert int(found.budgets(torch.tensor([4]), rows_of(100, asked=0))) == 100


@pytest.mark.parametrize("method", ["quest", "scout"])
def test_a_running_request_comes_to_attend_what_the_promise_needs(method: str) -> None:
    """Random keys, whose mass is flat: a budget of 4 of 30 pages cannot hold 0.9 of it. Every output is that of the
    pages that were selected; the engine checks that all of them are, once everything is attended."""
    promise = {"min_mass": 0.9, "max_kl": 0.02}
    keys = {"sparse": "always", "method": method, "quality": promise, "metrics": {"sample_interval": 1}}
    engine = Engine(config(**keys), spec(), num_pages=80, is_witnessed=True)
    engine.admit("a", 30 * PAGE)
    seen, masses = [], []
    for _ in range(25):
        engine.step({"a": 1}, tolerance=None)
        gauges = engine.runtime.gauges()
        assert gauges["hybrid_quality_max_kl"] == 0.02
        seen.append(gauges["hybrid_quality_budget_tokens"])
        masses.append(gauges["hybrid_quality_mass"])
    assert seen[0] == 4 * PAGE and masses[1] < 0.9
    # Frames hold seven pages, and then everything is attended; in place the budget grows to all pages. From time to
    # time less is tried.
    assert math.isinf(max(seen)) == (method == "scout") and max(seen) >= 30 * PAGE
    has, had = seen[-1], seen[-2]
    for _ in range(25):
        if has >= 40 * PAGE and (has > had or math.isinf(has)):  # it has just grown: less is not tried yet
            break
        engine.step({"a": 1}, tolerance=None)
        has, had = engine.runtime.gauges()["hybrid_quality_budget_tokens"], has
    engine.step({"a": 1}, tolerance=1e-4)  # as dense attention


def test_a_budget_falls_again_where_rows_attend_all_of_their_pages() -> None:
    """They are not sampled: a hard request would leave all that are shorter dense for ever."""
    found, stats = made(0.98)
    for _ in range(5):
        sample(stats, 0.5)
        budget(found)
    assert found.budget > 40
    for _ in range(400):  # easier requests
        if budget(found, 40) < 40:
            sample(stats, 0.999)
    assert found.budget < 10


def test_a_promise_that_cannot_be_watched_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"metrics.sample_interval.*quality.min_mass.*write 64, or remove it"):
        config(quality={"min_mass": 0.9}, metrics={"sample_interval": 0})
    with pytest.raises(ConfigError, match=r"quality.min_mass: got 1.5"):
        config(quality={"min_mass": 1.5})
    with pytest.raises(ConfigError, match=r"quality.min_mass: hgca has no budget .* write method: auto, or none"):
        resolve_method("hgca").check(config(method="hgca", quality={"min_mass": 0.9}), torch.device("cpu"), 3, 2)
    with pytest.raises(ConfigError, match=r"quality.max_kl: 0.01 says nothing .* --set quality.max_kl=0.01 and serve"):
        resolve_method("scout").check(config(quality={"max_kl": 0.01}), torch.device("cpu"), 3, 2)
    with pytest.raises(ConfigError, match=r"quality.max_kl: got 0"):
        config(quality={"max_kl": 0})
    with pytest.raises(ConfigError, match=r"quality.min_mass: infinigen has no budget"):
        resolve_method("infinigen").check(
            config(method="infinigen", quality={"min_mass": 0.9}), torch.device("cuda"), 3, 2
        )
