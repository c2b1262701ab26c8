"""The command as a whole, on a tiny model: files, resuming, errors."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybrid_backend.config import HybridConfig, config_from_mapping, load_config, read_heads
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.profile import profiler, session, summary
from hybrid_backend.tools.profile.gates import GateOptions
from hybrid_backend.tools.profile.network import Network, wrap
from hybrid_backend.tools.profile.options import Options
from hybrid_backend.tools.profile.report import Profile
from hybrid_backend.tools.profile.tau import tau_of
from hybrid_backend.tools.profile.texts import default_texts
from tests.support.models import llama_8b
from tests.unit.profile.models import build, encode

GATES = GateOptions(steps=4, context=400, sink=4, recent=16, samples=2, passkeys=2, words=3)
OPTIONS = Options(
    contexts=(320,),
    positions=24,
    windows=1,
    lookups=0,
    min_cosine=0.5,
    min_mass=0.2,
    max_kl=10.0,
    gates=None,
    plots=False,
)
WITH_GATES = replace(OPTIONS, gates=GATES)
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
    """Everything that was measured, but the seconds."""
    data = json.loads(out.with_suffix(".json").read_text())
    return {key: {k: v for k, v in stage.items() if k != "seconds"} for key, stage in data["stages"].items()}


def test_the_yaml_says_what_was_found_and_loads(network: Network, tmp_path: Path) -> None:
    out = tmp_path / "tiny.yaml"
    found = run(network, out, replace(WITH_GATES, held_out=(str(Path(__file__)),), plots=True))
    assert load_config(out) == found.config
    config = found.config
    assert config.model.specificity("org/tiny-gemma3")
    assert config.exact_layers == tuple(layer.layer for layer in found.layers if layer.why)
    assert config.lookahead.skip_layers == tuple(x.layer for x in found.layers if not x.why and (x.cosine or 0.0) < 0.5)
    assert [layer.layer for layer in found.layers] == [2, 5]
    assert isinstance(config.recall.intervals, tuple) and len(config.recall.intervals) == 6
    assert config.recall.intervals[0] == CONFIG.recall.intervals  # a sliding layer: not measured
    assert config.selection == CONFIG.selection and config.budget_tokens == CONFIG.budget_tokens
    assert [check.layer for check in found.checks] == [layer.layer for layer in found.layers if not layer.why]
    assert {path.name for path in found.files} == {
        *("tiny.yaml", "tiny.json", "tiny.heads.json"),
        *("tiny-layers.png", "tiny-cpu-ratio.png", "tiny-sparsity.png", "tiny-heads.png"),
    }
    assert all(path.stat().st_size for path in found.files)
    assert "measured" in out.read_text()
    assert len(found.gates["kv_head"]) == 2 and len(found.gates["query_head"][0]) == 4
    heads = read_heads(tmp_path / "tiny.heads.json", 6, 4, 2)
    assert heads == found.heads and heads.model == "tiny-gemma3"
    assert heads.importance[5] == pytest.approx(found.gates["query_head"][1], abs=1e-5)


def test_without_gates_there_is_no_heads_file_and_one_line_says_how_to_get_it(network: Network, tmp_path: Path) -> None:
    told = StringIO()
    found = run(network, tmp_path / "a.yaml", OPTIONS, told=told)
    assert found.heads is None and not (tmp_path / "a.heads.json").exists()
    (line,) = (line for line in told.getvalue().splitlines() if "heads file" in line)
    assert "--gates" in line


def dying(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> list[str]:
    """From now on the user presses Ctrl-C at a call of ``session.NAME``. Returns a log of the calls."""
    call, calls = getattr(session, name), list[str]()

    def interrupted(*args: Any) -> Any:
        calls.append(name)
        if len(calls) == at:
            raise KeyboardInterrupt
        return call(*args)

    monkeypatch.setattr(session, name, interrupted)
    return calls


def test_an_interrupted_run_goes_on_and_ends_as_a_whole_one(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two windows, between two layers, and in the midst of training."""
    whole, again = run(network, tmp_path / "whole.yaml", WITH_GATES), tmp_path / "again.yaml"
    train = session.train

    def dying_training(*args: Any) -> Any:
        *most, save = args

        def die(state: Any) -> None:
            save(state)
            raise KeyboardInterrupt

        return train(*most, die)

    windows = dying(monkeypatch, "measure_window", at=2)
    with pytest.raises(KeyboardInterrupt):
        run(network, again, WITH_GATES)
    assert len(stages(again)) == 1
    dying(monkeypatch, "divergence", at=2)
    with pytest.raises(KeyboardInterrupt):
        run(network, again, WITH_GATES)
    assert len(windows) == 3  # the finished window was not measured again
    (kept,) = (stage["kl"] for key, stage in stages(again).items() if key.startswith("divergence"))
    assert len(kept) == 1, "one of two layers"
    monkeypatch.setattr(session, "train", dying_training)
    with pytest.raises(KeyboardInterrupt):
        run(network, again, WITH_GATES)
    monkeypatch.setattr(session, "train", train)
    assert run(network, again, WITH_GATES).config == whole.config
    assert len(windows) == 3
    assert stages(again) == stages(tmp_path / "whole.yaml")


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


def test_without_matplotlib_the_profile_is_written_and_one_line_says_that_pictures_are_left_out(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = StringIO()
    found = run(network, tmp_path / "a.yaml", replace(OPTIONS, plots=True), told=told)
    assert told.getvalue().count("pictures are left out: matplotlib is not installed") == 1
    assert {path.suffix for path in found.files} == {".yaml", ".json"} and load_config(tmp_path / "a.yaml")


def test_a_new_threshold_of_mass_needs_no_new_measurement_and_a_new_budget_or_cosine_does(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.yaml"
    run(network, out)
    measure, calls = session.measure_window, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return measure(*args)

    monkeypatch.setattr(session, "measure_window", counted)
    strict = run(network, out, replace(OPTIONS, min_mass=0.99999, tau=(0.05, "test")))
    assert not calls and strict.config.exact_layers == (2, 5) and strict.config.recall.threshold == 0.05
    run(network, out, OPTIONS, CONFIG.model_copy(update={"budget_tokens": 112}))
    assert len(calls) == 2
    run(network, out, replace(OPTIONS, fresh=True), CONFIG.model_copy(update={"budget_tokens": 112}))
    assert len(calls) == 4
    own = run(network, out, replace(OPTIONS, min_cosine=0.99999))
    assert len(calls) == 6
    predicted = [layer.layer for layer in own.layers if layer.cosine is not None and not layer.why]
    assert own.config.lookahead.skip_layers == tuple(predicted) and 5 in predicted
    *_, window = (stage for key, stage in stages(out).items() if key.startswith("window"))
    assert all(layer["mass"] == layer["mass_true"] for layer in window["layers"]), "the layers' own queries select"


def test_for_a_kl_the_budget_is_chosen_that_attends_the_fewest_tokens_and_the_mass_that_keeps_it_is_written(
    network: Network, tmp_path: Path
) -> None:
    small = CONFIG.model_copy(update={"budget_tokens": 64})
    budgets, kl, attended, sparse = (64, 128), {}, {}, [0.0]
    for budget in budgets:
        run(network, tmp_path / f"{budget}.yaml", OPTIONS, CONFIG.model_copy(update={"budget_tokens": budget}))
        costs = json.loads((tmp_path / f"{budget}.json").read_text())["exact"]
        kl[budget] = costs["together"][0]["text"]
    between, ample = 0.5 * (kl[64] + kl[128]), 2 * kl[64]
    for most in (between, ample, 1e-12):  # the larger budget, the smaller one, all exact
        config = small.model_copy(update={"quality": small.quality.model_copy(update={"max_kl": most})})
        found = run(network, tmp_path / "a.yaml", OPTIONS, config)
        for budget in budgets:
            fixed = CONFIG.model_copy(update={"budget_tokens": budget})
            exact = run(
                network, tmp_path / "b.yaml", replace(OPTIONS, max_kl=most, outliers=False), fixed
            ).config.exact_layers
            attended[budget] = 320 * len(exact) + budget * (2 - len(exact))
        assert attended[found.config.budget_tokens] == min(attended.values())
        if most in (between, ample):
            assert found.config.budget_tokens == {between: 128, ample: 64}[most]
        sparse = [layer.mass for layer in found.layers if not layer.why]
        assert found.config.quality.max_kl == most
        mean = sum(sparse) / len(sparse) if sparse else 1.0
        assert 0 <= mean - found.config.quality.promise < 0.02, "of the window where it is least"
        assert load_config(tmp_path / "a.yaml") == found.config
    assert not sparse
    data = {"budget_tokens": 64, "page_size": 16, "quality": {"max_kl": 0.1}, "method": "hgca"}
    with pytest.raises(ConfigError, match=r"quality.max_kl: hgca"):
        run(network, tmp_path / "a.yaml", OPTIONS, config_from_mapping(data, "test"))


def test_for_an_attention_mass_the_smallest_budget_that_keeps_it_is_written(network: Network, tmp_path: Path) -> None:

    def kept(config: HybridConfig) -> float:
        layers = run(network, tmp_path / "fixed.yaml", OPTIONS, config).layers
        return sum(layer.mass for layer in layers) / len(layers)

    small, large = (CONFIG.model_copy(update={"budget_tokens": budget}) for budget in (64, 128))
    less, more = kept(small), kept(large)
    assert 0 < less < more < 1
    for promise, budget in ((0.5 * less, 64), (0.5 * (less + more), 128), (0.5 * (more + 1), 128)):
        config = small.model_copy(update={"quality": small.quality.model_copy(update={"min_mass": promise})})
        told, out = StringIO(), tmp_path / f"{promise:.4f}.yaml"
        found = run(network, out, OPTIONS, config, told)
        assert found.config.budget_tokens == budget and found.config.quality.min_mass == promise
        assert load_config(out) == found.config
        text = told.getvalue()
        assert ("is not kept by any budget" in text) == (promise > more)
        assert ("128: " in text) == (budget == 128), "no more is tried than needed"
        assert f"(quality.min_mass: {promise:g})" in text
    data = {"page_size": 16, "quality": {"min_mass": 0.9}, "method": "hgca"}
    with pytest.raises(ConfigError, match=r"quality.min_mass: hgca"):
        run(network, tmp_path / "a.yaml", OPTIONS, config_from_mapping(data, "test"))


@pytest.mark.parametrize("at_once", [1, 4])
def test_as_few_layers_are_exact_as_keep_the_others_together_below_the_kl(
    at_once: int, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_AT_ONCE", at_once)  # two layers only: with 1, the search takes several batches
    out, options = tmp_path / "a.yaml", replace(OPTIONS, windows=2, min_mass=0.0)

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
    out, options = tmp_path / "a.yaml", replace(OPTIONS, min_cosine=-1.0, min_mass=0.0, outliers=False)
    assert run(network, out, options).config.lookahead.skip_layers == ()
    measured = json.loads(out.with_suffix(".json").read_text())
    assert set(measured["own"]["alone"]["text"]) == {"2", "5"} and len(measured["own"]["together"]) == 1
    assert "true -> predicted" not in out.read_text()
    monkeypatch.setattr(summary, "LITTLE", 0.0)
    monkeypatch.setattr(summary, "PREDICTION_FACTOR", 0.0)  # nothing is good enough
    assert run(network, out, options).config.lookahead.skip_layers == (2, 5)
    every = json.loads(out.with_suffix(".json").read_text())["own"]["together"]
    assert len(every) == 3 and every[2]["text"] == pytest.approx(measured["true"]["text"])
    assert "layer 5 alone, true -> predicted query: KL" in out.read_text()
    still = config_from_mapping({**CONFIG.model_dump(mode="json"), "lookahead": {"enabled": False}}, "test")
    assert run(network, out, options, still).config.lookahead.skip_layers == ()
    assert json.loads(out.with_suffix(".json").read_text())["own"] is None


def test_slots_are_raised_until_every_layer_is_below_tau_if_asked_for(network: Network, tmp_path: Path) -> None:
    out = tmp_path / "a.yaml"
    run(network, out)
    windows = [stage["layers"] for key, stage in stages(out).items() if key.startswith("window")]
    assert set(windows[0][0]["ratios"]) == {"9", "12", "14", "18"}
    best = [min(max(w[i]["ratios"]["14"][k] for w in windows) for k in ("1", "2", "3")) for i in (0, 1)]
    enough = replace(OPTIONS, margin=0.0, tau=(max(best) + 1e-6, "test"))
    left, raised = run(network, out, enough), run(network, out, replace(enough, fit_frames=True))
    assert left.config.frames_per_request == "auto" and not all(layer.below for layer in left.layers)
    assert raised.config.frames_per_request == 14 and all(layer.below for layer in raised.layers)
    assert "--fit-frames" not in out.read_text()


def test_intervals_are_chosen_a_margin_below_tau(network: Network, tmp_path: Path) -> None:
    out = tmp_path / "a.yaml"
    cautious = run(network, out, replace(OPTIONS, tau=(0.2, "test"), margin=0.5))
    lower = run(network, out, replace(OPTIONS, tau=(0.1, "test"), margin=0.0))
    assert [layer.interval for layer in cautious.layers] == [layer.interval for layer in lower.layers]
    assert cautious.config.recall.threshold == 0.2, "the margin is in the choice, not in the threshold"


def test_mistakes_are_told_before_anything_is_measured(network: Network, tmp_path: Path) -> None:
    out = tmp_path / "a.yaml"
    mistakes = [
        (replace(OPTIONS, contexts=(128,)), "everything is resident up to 144 tokens"),
        (replace(OPTIONS, contexts=(4096,)), "the model's window is 1024"),
        (replace(OPTIONS, texts=("nowhere.txt",)), "nowhere.txt"),
        (replace(OPTIONS, positions=1), "--positions"),
        (replace(OPTIONS, margin=1.0), "--margin"),
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
        run(network, tmp_path / "folder.yaml", OPTIONS)
    out.with_suffix(".json").write_text("{}")
    with pytest.raises(ConfigError, match="--fresh"):
        run(network, out)


def test_the_default_texts_are_prose_and_code_and_long() -> None:
    (_, prose), (_, code) = default_texts()
    assert len(prose) > 300_000 and prose.count(" the ") > 2000
    assert len(code) > 300_000 and code.count("\n    def ") > 300


def test_tau_follows_the_machine() -> None:
    """A faster link between CPU and its memory allows more; batches leave the CPU less beside the device's matrices."""
    shape = llama_8b()
    config = HybridConfig()
    few, many = (tau_of(find_hardware("h100"), shape, config, 32768, batch) for batch in (8, 32))
    assert 0.01 < many < few <= 1
    machine = find_hardware("h100")
    with pytest.raises(ConfigError, match=r"recall\.threshold"):
        tau_of(machine.model_copy(update={"device": "cpu"}), shape, config, 32768)
