"""The command as a whole, on a tiny model: files, resuming, errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybrid_backend.config import HybridConfig, config_from_mapping, load_config, read_heads
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.profile import profiler, session, summary
from hybrid_backend.tools.profile.gates import GateOptions
from hybrid_backend.tools.profile.network import Network, wrap
from hybrid_backend.tools.profile.options import Options
from hybrid_backend.tools.profile.report import Profile
from hybrid_backend.tools.profile.texts import default_texts
from tests.unit.profile.models import build, encode

GATES = GateOptions(steps=4, context=400, sink=4, recent=16, samples=2, passkeys=2, words=3)
OPTIONS = Options(
    contexts=(320,),
    positions=24,
    windows=1,
    lookups=0,
    min_cosine=0.5,
    max_kl=10.0,
    gates=GATES,
)
CONFIG = config_from_mapping({"page_size": 16, "budget_tokens": 96, "selection": {"aggregate": "max"}}, "test")


@pytest.fixture(scope="module")
def network() -> Network:
    return wrap(build("gemma3"))


def run(
    network: Network, out: Path, options: Options = OPTIONS, config: HybridConfig = CONFIG, told: StringIO | None = None
) -> Profile:
    console = Console(file=told or StringIO(), width=200)
    return profiler.profile("tiny-gemma3", out, config, options, console, network, encode)


def stages(out: Path) -> dict[str, Any]:
    """Everything that was measured."""
    return dict(json.loads(out.with_suffix(".json").read_text())["stages"])


def test_the_yaml_says_what_was_found_and_loads(network: Network, tmp_path: Path) -> None:
    out = tmp_path / "tiny.yaml"
    found = run(network, out)
    assert load_config(out) == found.config
    config = found.config
    assert config.model.specificity("org/tiny-gemma3")
    assert config.exact_layers == tuple(layer.layer for layer in found.layers if layer.is_exact)
    assert config.lookahead.skip_layers == tuple(
        x.layer for x in found.layers if not x.is_exact and (x.cosine or 0.0) < 0.5
    )
    assert [layer.layer for layer in found.layers] == [2, 5]
    assert isinstance(config.recall.intervals, tuple) and len(config.recall.intervals) == 6
    assert config.recall.intervals[0] == CONFIG.recall.intervals  # a sliding layer: not measured
    assert config.selection == CONFIG.selection and config.budget_tokens == CONFIG.budget_tokens
    assert {path.name for path in found.files} == {"tiny.yaml", "tiny.json", "tiny.heads.json"}
    assert all(path.stat().st_size for path in found.files)
    assert "measured" in out.read_text()
    heads = read_heads(tmp_path / "tiny.heads.json", 6, 4, 2)
    assert heads == found.heads and heads.model == "tiny-gemma3"
    trained = {stage["label"]: stage["state"] for stage in stages(out).values() if "state" in stage}
    assert heads.importance[5] == pytest.approx(trained["query_head"]["gates"][1], abs=1e-5)


def test_without_gates_there_is_no_heads_file_and_one_line_says_how_to_get_it(network: Network, tmp_path: Path) -> None:
    told = StringIO()
    found = run(network, tmp_path / "a.yaml", replace(OPTIONS, gates=None), told=told)
    assert found.heads is None and not (tmp_path / "a.heads.json").exists()
    (line,) = (line for line in told.getvalue().splitlines() if "heads file" in line)
    assert "--gates" in line


@pytest.mark.parametrize("measured", ["measure_window", "divergence", "train"])
def test_every_step_is_stored_before_the_next_one_begins_and_an_interrupted_run_ends_as_a_whole_one(
    measured: str, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = run(network, tmp_path / "whole.yaml"), tmp_path / "again.yaml"
    usual, stored = getattr(session, measured), list[dict[str, Any]]()

    def interrupt(*args: Any) -> Any:
        monkeypatch.setattr(session, measured, second)
        return usual(*args)

    def second(*_: Any) -> Any:
        stored.append(stages(out))
        raise KeyboardInterrupt

    def interrupt_training(*args: Any) -> Any:
        yield next(usual(*args))
        second()

    monkeypatch.setattr(session, measured, interrupt_training if measured == "train" else interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(network, out)
    *_, last = stored[0].values()
    step = last["state"]["step"] if measured == "train" else len(last["kl"] if measured == "divergence" else [last])
    assert step == 1
    monkeypatch.undo()
    assert run(network, out).config == whole.config
    assert stages(out) == stages(tmp_path / "whole.yaml")


def test_the_time_it_takes_is_told_first_and_each_stage_once_with_what_is_left(
    network: Network, tmp_path: Path
) -> None:
    told = StringIO()
    run(network, tmp_path / "a.yaml", told=told)
    estimate, *lines = told.getvalue().splitlines()
    planned = re.fullmatch(r"about \d+ (s|min) on \d+ threads?, in (\d+) stages", estimate)
    assert planned is not None, estimate
    stage = [re.fullmatch(r"(\d+) of (\d+): (.+); about \d+ (s|min) left", line) for line in lines]
    begun = [match for match in stage if match is not None]
    titles = [match[3] for match in begun]
    assert len(set(titles)) == len(titles) > 3 and "KL of each layer alone" in titles
    numbers = [int(match[1]) for match in begun]
    assert numbers == sorted(set(numbers)) and {match[2] for match in begun} == {planned[2]}


def test_a_new_threshold_needs_no_new_measurement_and_a_new_budget_or_cosine_does(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / "a.yaml", replace(OPTIONS, gates=None)
    run(network, out, options)
    measure, calls = session.measure_window, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return measure(*args)

    monkeypatch.setattr(session, "measure_window", counted)
    strict = run(network, out, replace(options, max_kl=0.0, outliers=False, tau=0.05))
    assert not calls and strict.config.exact_layers == (2, 5) and strict.options.tau == 0.05
    run(network, out, options, CONFIG.model_copy(update={"budget_tokens": 112}))
    assert len(calls) == 2
    run(network, out, replace(options, fresh=True), CONFIG.model_copy(update={"budget_tokens": 112}))
    assert len(calls) == 4
    own = run(network, out, replace(options, min_cosine=0.99999))
    assert len(calls) == 6
    predicted = [layer.layer for layer in own.layers if layer.cosine is not None and not layer.is_exact]
    assert own.config.lookahead.skip_layers == tuple(predicted) and 5 in predicted


def test_for_a_kl_the_budget_is_chosen_that_attends_the_fewest_tokens_and_the_mass_that_keeps_it_is_written(
    network: Network, tmp_path: Path
) -> None:
    options, small = replace(OPTIONS, gates=None), CONFIG.model_copy(update={"budget_tokens": 64})
    budgets, kl, attended, sparse = (64, 128), {}, {}, [0.0]
    for budget in budgets:
        run(network, tmp_path / f"{budget}.yaml", options, CONFIG.model_copy(update={"budget_tokens": budget}))
        costs = json.loads((tmp_path / f"{budget}.json").read_text())["exact"]
        kl[budget] = costs["together"][0]["text"]
    between, ample = 0.5 * (kl[64] + kl[128]), 2 * kl[64]
    for most in (between, ample, 1e-12):  # the larger budget, the smaller one, all exact
        config = small.model_copy(update={"quality": small.quality.model_copy(update={"max_kl": most})})
        found = run(network, tmp_path / "a.yaml", options, config)
        for budget in budgets:
            fixed = CONFIG.model_copy(update={"budget_tokens": budget})
            exact = run(
                network, tmp_path / "b.yaml", replace(options, max_kl=most, outliers=False), fixed
            ).config.exact_layers
            attended[budget] = 320 * len(exact) + budget * (2 - len(exact))
        assert attended[found.config.budget_tokens] == min(attended.values())
        if most in (between, ample):
            assert found.config.budget_tokens == {between: 128, ample: 64}[most]
        sparse = [layer.mass for layer in found.layers if not layer.is_exact]
        assert found.config.quality.max_kl == most
        mean = sum(sparse) / len(sparse) if sparse else 1.0
        assert 0 <= mean - found.config.quality.promise < 0.02, "of the window where it is least"
        assert load_config(tmp_path / "a.yaml") == found.config
    assert not sparse
    data = {"budget_tokens": 64, "page_size": 16, "quality": {"max_kl": 0.1}, "method": "hgca"}
    with pytest.raises(ConfigError, match=r"quality.max_kl: hgca"):
        run(network, tmp_path / "a.yaml", options, config_from_mapping(data, "test"))


def test_for_an_attention_mass_the_smallest_budget_that_keeps_it_is_written(network: Network, tmp_path: Path) -> None:
    options = replace(OPTIONS, gates=None)

    def kept(config: HybridConfig) -> float:
        layers = run(network, tmp_path / "fixed.yaml", options, config).layers
        return sum(layer.mass for layer in layers) / len(layers)

    small, large = (CONFIG.model_copy(update={"budget_tokens": budget}) for budget in (64, 128))
    less, more = kept(small), kept(large)
    assert 0 < less < more < 1
    for promise, budget in ((0.5 * less, 64), (0.5 * (less + more), 128), (0.5 * (more + 1), 128)):
        config = small.model_copy(update={"quality": small.quality.model_copy(update={"min_mass": promise})})
        told, out = StringIO(), tmp_path / f"{promise:.4f}.yaml"
        found = run(network, out, options, config, told)
        assert found.config.budget_tokens == budget and found.config.quality.min_mass == promise
        assert load_config(out) == found.config
        text = told.getvalue()
        assert ("is not kept by any budget" in text) == (promise > more)
        assert ("128: " in text) == (budget == 128), "no more is tried than needed"
        assert f"(quality.min_mass: {promise:g})" in text
    data = {"page_size": 16, "quality": {"min_mass": 0.9}, "method": "hgca"}
    with pytest.raises(ConfigError, match=r"quality.min_mass: hgca"):
        run(network, tmp_path / "a.yaml", options, config_from_mapping(data, "test"))


@pytest.mark.parametrize("at_once", [1, 4])
def test_as_few_layers_are_exact_as_keep_the_others_together_below_the_kl(
    at_once: int, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_AT_ONCE", at_once)  # two layers only: with 1, the search takes several batches
    out, options = tmp_path / "a.yaml", replace(OPTIONS, gates=None, windows=2)

    def costs() -> tuple[dict[int, float], list[float]]:
        held = json.loads(out.with_suffix(".json").read_text())["exact"]
        return {int(i): kl for i, kl in held["alone"]["text"].items()}, [x["text"] for x in held["together"]]

    run(network, out, replace(options, max_kl=0.0))
    alone, together = costs()
    first = max(alone, key=lambda i: alone[i])
    assert together[0] > together[1] > together[2] == pytest.approx(0, abs=1e-6)
    for most, exact in ((together[0], ()), (together[1], (first,)), (together[1] / 2, (2, 5))):
        found = run(network, out, replace(options, max_kl=most, outliers=False))
        assert found.config.exact_layers == exact
        assert costs()[1] == together[: len(exact) + 1]
    found = run(network, out, replace(options, max_kl=together[0]))
    stands_out, rest_stands_out = 2 * together[1] < together[0], together[1] > 0.1 * together[0]  # nothing is left then
    assert found.config.exact_layers == (() if not stands_out else (2, 5) if rest_stands_out else (first,))
    found = run(network, out, replace(options, max_kl=together[1], outliers=False))
    assert f"layers {first} exact: KL {together[1]:.4f} (text)" in out.read_text()


def test_layers_whose_predicted_query_costs_too_much_select_by_their_own(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / "a.yaml", replace(OPTIONS, gates=None, min_cosine=-1.0, outliers=False)
    assert run(network, out, options).config.lookahead.skip_layers == ()
    measured = json.loads(out.with_suffix(".json").read_text())
    assert set(measured["own"]["alone"]["text"]) == {"2", "5"} and len(measured["own"]["together"]) == 1
    monkeypatch.setattr(summary, "LITTLE", 0.0)
    monkeypatch.setattr(summary, "PREDICTION_FACTOR", 0.0)  # nothing is good enough
    assert run(network, out, options).config.lookahead.skip_layers == (2, 5)
    every = json.loads(out.with_suffix(".json").read_text())["own"]["together"]
    assert len(every) == 3 and every[2]["text"] == pytest.approx(measured["true"]["text"])
    assert "layers 2, 5 by their own: " in out.read_text()
    still = config_from_mapping({**CONFIG.model_dump(mode="json"), "lookahead": {"enabled": False}}, "test")
    assert run(network, out, options, still).config.lookahead.skip_layers == ()
    assert json.loads(out.with_suffix(".json").read_text())["own"] is None


def test_intervals_are_chosen_a_margin_below_the_threshold(network: Network, tmp_path: Path) -> None:
    out, options = tmp_path / "a.yaml", replace(OPTIONS, gates=None)
    cautious = run(network, out, replace(options, margin=0.5, tau=0.2))
    lower = run(network, out, replace(options, margin=0.0, tau=0.1))
    assert [layer.interval for layer in cautious.layers] == [layer.interval for layer in lower.layers]
    assert cautious.options.tau == 0.2, "the margin is in the choice, not in tau"


def test_mistakes_are_told_before_anything_is_measured(network: Network, tmp_path: Path) -> None:
    out = tmp_path / "a.yaml"
    mistakes = [
        (replace(OPTIONS, contexts=(128,)), "everything is resident up to 144 tokens"),
        (replace(OPTIONS, contexts=(4096,)), "the model's window is 1024"),
        (replace(OPTIONS, positions=1), "--positions"),
        (replace(OPTIONS, margin=1.0), "--margin"),
        (replace(OPTIONS, tau=0.0), "--tau"),
        (replace(OPTIONS, lookups=1), "too short for lookups"),
        (replace(OPTIONS, lookups=-1), "--lookups"),
    ]
    for options, words in mistakes:
        with pytest.raises(ConfigError, match=words):
            run(network, out, options)
    with pytest.raises(ConfigError, match="--out"):
        run(network, tmp_path / "nowhere" / "a.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder.yaml: cannot be written .* give another --out"):
        run(network, tmp_path / "folder.yaml", replace(OPTIONS, gates=None))
    out.with_suffix(".json").write_text("{}")
    with pytest.raises(ConfigError, match="--fresh"):
        run(network, out)


def test_the_default_texts_are_prose_and_code_and_long() -> None:
    (_, prose), (_, code) = default_texts()
    assert len(prose) > 300_000 and prose.count(" the ") > 2000
    assert len(code) > 300_000 and code.count("\n    def ") > 300
