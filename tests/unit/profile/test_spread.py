"""Budgets per layer: how they are handed out, and the stage of the profile that measures them."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from hybrid_backend.config import HybridConfig, config_from_mapping, load_config
from hybrid_backend.tools.profile import profiler, session
from hybrid_backend.tools.profile.network import Network, wrap
from hybrid_backend.tools.profile.options import Options
from hybrid_backend.tools.profile.spread import Spread, factors_of, pages_of, sizes_of, spread
from tests.unit.profile.models import VOCABULARY, build

SIZES = (16, 32, 64)
kl = st.floats(-1e-8, 2)
measured = st.lists(
    st.fixed_dictionaries({kind: st.tuples(kl, kl, kl) for kind in ("text", "lookups")}), min_size=1, max_size=8
).map(lambda layers: {kind: {3 * i: layer[kind] for i, layer in enumerate(layers)} for kind in ("text", "lookups")})
"""Layers 0, 3, 6, ...; KL may rise with the budget and be below zero, as measurements do."""
some_sizes = (
    st.tuples(st.integers(4, 40), st.integers(1, 40), st.integers(1, 80))
    .map(lambda x: sizes_of(x[0] + x[1], x[0], x[0] + x[1] + x[2]))
    .filter(lambda sizes: sizes is not None)
)


@given(measured, some_sizes)
def test_the_mean_is_the_budget_and_every_layer_is_within_the_bounds(alone: Any, sizes: Any) -> None:
    low, budget, high = sizes
    pages = spread(alone, sizes)
    assert list(pages) == list(alone["text"])
    assert fmean(pages.values()) == budget
    assert all(low <= count <= high for count in pages.values())


@given(measured, some_sizes, st.integers(2, 8))
def test_factors_have_two_digits_a_mean_of_one_and_give_the_pages_back(alone: Any, sizes: Any, least: int) -> None:
    assume(least <= sizes[0])  # as `sizes_of` sees to
    pages, layers = spread(alone, sizes), 30
    factors = factors_of(pages, sizes[1], layers)
    assert len(factors) == layers and all(round(factor, 2) == factor for factor in factors)
    assert all(factors[layer] == 1.0 for layer in range(layers) if layer not in pages)
    assert abs(fmean(factors[layer] for layer in pages) - 1) <= 0.005 + 1e-9
    keys = {"budget_tokens": sizes[1] * 16, "page_size": 16, "sinks": least - 2, "recent": 1, "budget_factors": factors}
    attended = pages_of(CONFIG.model_copy(update=keys), pages)
    assert all(count >= least for count in attended.values())
    for layer, count in pages.items():
        assert abs(attended[layer] - max(least, count)) <= 1 + 0.01 * sizes[1]


@given(st.tuples(kl, kl, kl), st.tuples(kl, kl, kl), st.integers(1, 12), some_sizes)
def test_layers_that_are_alike_get_alike(text: Any, lookups: Any, layers: int, sizes: Any) -> None:
    alone = {"text": dict.fromkeys(range(layers), text), "lookups": dict.fromkeys(range(layers), lookups)}
    assert set(spread(alone, sizes).values()) == {sizes[1]}
    assert set(factors_of(spread(alone, sizes), sizes[1], layers)) == {1.0}


def test_a_layer_that_does_not_mind_gets_the_least_and_one_that_costs_gets_more() -> None:
    usual = (0.004, 0.002, 0.001)
    kinds = {"text": {0: usual, 1: (0.0, 0.0, 0.0), 2: usual, 3: (0.4, 0.1, 0.02)}}
    pages = spread(kinds, SIZES)
    assert pages[1] == 16 and pages[3] == 64
    assert 16 <= pages[0] <= 32 and abs(pages[0] - pages[2]) <= 1


def test_each_kind_of_probe_counts_as_a_share_of_its_sum() -> None:
    """Lookups that cost a thousand times what texts cost do not decide alone."""
    falls, flat = (0.2, 0.1, 0.05), (0.1, 0.1, 0.1)
    text = {0: falls, 1: flat, 2: flat}
    lookups = {0: flat, 1: tuple(1000 * x for x in falls), 2: tuple(1000 * x for x in flat)}
    lookups[0] = lookups[2]
    pages = spread({"text": text, "lookups": lookups}, SIZES)  # type: ignore[dict-item]
    assert pages == {0: 40, 1: 40, 2: 16}


def test_a_layer_where_less_seems_better_is_taken_for_one_that_does_not_mind() -> None:
    assert spread({"text": {0: (0.01, 0.02, 0.03), 1: (0.01, 0.005, 0.002)}}, SIZES) == {0: 16, 1: 48}


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        ((32, 4, 1000), (16, 32, 64)),
        ((33, 4, 1000), (16, 33, 66)),
        ((6, 4, 1000), (4, 6, 12)),
        ((32, 4, 50), (16, 32, 50)),
        ((4, 4, 1000), None),
        ((32, 4, 32), None),
    ],
)
def test_half_and_twice_as_far_as_they_are_budgets(given_sizes: tuple[int, int, int], expected: Any) -> None:
    assert sizes_of(*given_sizes) == expected


@pytest.mark.parametrize(
    ("even", "apart", "helps"),
    [
        ((0.0149, 0.0480), (0.0122, 0.0259), True),
        ((0.01, 0.02), (0.01, 0.0195), True),
        ((0.01, 0.02), (0.0099, 0.0198), False),  # by less than 2 %
        ((0.01, 0.02), (0.0101, 0.01), False),  # one gets worse
        ((0.0, 0.0), (0.0, 0.0), False),
    ],
)
def test_it_helps_where_no_kind_gets_worse_and_one_gets_better(even: Any, apart: Any, helps: bool) -> None:
    kinds = ("text", "lookups")
    found = Spread(SIZES, {}, {}, (), dict(zip(kinds, even, strict=True)), dict(zip(kinds, apart, strict=True)))
    assert found.helps == helps


# --- the stage ---

OPTIONS = Options(
    contexts=(400,),
    positions=8,
    windows=1,
    lookups=1,
    texts=(__file__,),
    min_cosine=0.5,
    max_kl=1e9,
    gates=None,
)
KEYS = {"page_size": 16, "budget_tokens": 128, "selection": {"aggregate": "max"}}
CONFIG = config_from_mapping(KEYS, "test")


def words(text: str) -> list[int]:
    """A tokenizer of one token per four characters."""
    return [crc32(text[at : at + 4].encode()) % VOCABULARY for at in range(0, len(text), 4)]


@pytest.fixture(scope="module")
def network() -> Network:
    return wrap(build("llama"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: what one has measured, another one finds."""
    return tmp_path_factory.mktemp("profile") / "a.yaml"


def run(
    network: Network, out: Path, options: Options = OPTIONS, config: HybridConfig = CONFIG
) -> tuple[profiler.Profile, str]:
    file = StringIO()
    console = Console(file=file, width=200)
    found = profiler.profile("tiny", out, config, options, console, network, words)
    (*_, line) = [line for line in file.getvalue().splitlines() if line.startswith("budgets per layer")] or [""]
    return found, line


@pytest.mark.parametrize("helps", [True, False])
def test_the_profile_writes_budgets_that_help_and_says_what_was_measured(
    helps: bool, network: Network, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spread, "helps", helps)  # random weights: whether they do is chance
    found, line = run(network, out)
    assert found.spread is not None and load_config(out) == found.config
    apart = found.spread
    assert apart.sizes == (64, 128, 256) and list(apart.tokens) == [0, 1, 2]
    assert fmean(apart.tokens.values()) == 128
    for kind, layers in apart.alone.items():
        assert {layer.layer: layer.kl[kind] for layer in found.layers} == {i: kl[1] for i, kl in layers.items()}
    costs = json.loads(out.with_suffix(".json").read_text())["exact"]["together"][0]
    assert apart.even == pytest.approx(costs)
    changes = ", ".join(f"{apart.even[kind]:.4f} -> {apart.spread[kind]:.4f} ({kind})" for kind in ("text", "lookups"))
    assert json.loads(out.with_suffix(".json").read_text())["spread"]["spread"] == apart.spread
    if helps:
        assert found.config.budget_factors == apart.factors
        found.config.validate_for(3)
        assert line == f"budgets per layer: KL {changes}" and f"these: KL {changes}" in out.read_text()
    else:
        assert found.config.budget_factors == () and "budget_factors" not in out.read_text()
        assert line == f"budgets per layer: none, they gain too little: KL {changes}"


def test_what_was_measured_is_not_measured_again_and_given_budgets_do_not_count(
    network: Network, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, line = run(network, out)
    monkeypatch.setattr(session, "divergence", None)
    given_factors = CONFIG.model_copy(update={"budget_factors": (2.0, 0.5, 0.5)})
    again, same = run(network, out, config=given_factors)
    assert (again.config, again.spread, same) == (found.config, found.spread, line)
    assert run(network, out, replace(OPTIONS, spread=False), given_factors)[0].config.budget_factors == ()


def test_where_they_cannot_be_measured_one_line_says_why(network: Network, out: Path) -> None:
    tiny, other = {**KEYS, "budget_tokens": 64}, {**KEYS, "method": "hgca"}
    for options, keys, why in [
        (replace(OPTIONS, lookups=0), KEYS, "they are found by lookups, too; write --lookups 1 or more"),
        (replace(OPTIONS, max_kl=0.0, outliers=False), KEYS, "fewer than two layers are sparse"),
        (OPTIONS, tiny, "no room for less and for more than 64 tokens"),
        (OPTIONS, other, "method hgca has none"),
        (replace(OPTIONS, spread=False), KEYS, ""),
    ]:
        found, line = run(network, out, options, config_from_mapping(keys, "test"))
        assert line == (f"budgets per layer: not measured, {why}" if why else "")
        assert found.spread is None and found.config.budget_factors == ()


def test_layers_get_as_much_more_as_the_context_has_room_for(network: Network, out: Path) -> None:
    found, _ = run(network, out, config=CONFIG.model_copy(update={"budget_tokens": 256}))
    assert found.spread is not None and found.spread.sizes == (128, 256, 336)


def test_the_mass_of_a_promise_is_that_with_the_budgets_that_are_written(
    network: Network, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.model_copy(update={"quality": CONFIG.quality.model_copy(update={"max_kl": 1e9})})
    promises = []
    for helps in (True, False):
        monkeypatch.setattr(Spread, "helps", helps)
        found, _ = run(network, out, config=config)
        promises.append(found.config.quality.promise)
    assert found.spread is not None and len(set(found.spread.tokens.values())) > 1
    assert promises[0] != promises[1] and all(0 < mass < 1 for mass in promises)
