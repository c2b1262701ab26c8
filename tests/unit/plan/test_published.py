"""`hybrid plan` of published models, with the configurations that are shipped for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.config.load import find_config, shipped_configs
from hybrid_backend.tools.hub import entries
from hybrid_backend.tools.plan.model import find_shape
from hybrid_backend.tools.plan.published import PUBLISHED, published, relative
from tests.support.model_cards import CARDS


@pytest.mark.parametrize("name", CARDS)
def test_published_models_are_planned_by_the_kv_of_their_full_layers(name: str, tmp_path: Path) -> None:
    assert published(name) is relative(name) is not None
    card, context = CARDS[name], 32768
    folder = tmp_path / name.partition("/")[2]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(card.config))
    arguments = ["plan", str(folder / "config.json"), "--context", str(context), "--machine=h200", "--ram=2048GiB"]
    result = CliRunner().invoke(app, [*arguments, "--method", "scout", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    pools = {item["name"]: item["bytes"] for item in rows["scout"]["items"]}
    kept = card.kv_kib * 1024 * context
    windows = 1.6 if "gpt-oss" in name else 1.05  # blocks for windows, and for the tokens of steps in flight
    assert kept <= pools["host pool"] <= windows * kept
    assert (rows["scout"]["tokens_per_s"] is not None) == rows["scout"]["fits"]
    assert pools["weights"] / 2e9 == pytest.approx(card.billions, rel=0.05)


def test_every_shipped_configuration_has_the_shape_of_a_model_that_it_is_found_for() -> None:
    for stem in {file.stem for file in shipped_configs()} - {"default"}:
        assert find_config(PUBLISHED[stem].hub_id).stem == stem
    for name, entry in PUBLISHED.items():
        assert relative(entry.hub_id) is published(name) is entry
        assert find_shape(entry.hub_id).full_layers == CARDS[entry.hub_id].full_layers
    for entry in entries():
        assert published(entry.name) is not None, "models of the catalog"


@pytest.mark.parametrize(
    ("model", "planned", "served"),
    [
        ("qwen3-14b", "qwen3-14b", "Qwen/Qwen3-14B"),
        ("Qwen/Qwen3-14B", "Qwen/Qwen3-14B", "Qwen/Qwen3-14B"),
        ("mistral-7b", "mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("Gemma-3-12B-it", "Gemma-3-12B-it", "google/gemma-3-12b-it"),
        ("smollm2-135m-instruct", "smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("qwen3-8b-awq", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("unsloth/llama-3.2-3b-instruct", "meta-llama/Llama-3.2-3B-Instruct", "unsloth/llama-3.2-3b-instruct"),
    ],
)
def test_names_of_published_models_are_planned_without_a_network(
    model: str, planned: str, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(app, ["plan", model, "--machine=h200", "--ram=2TiB", "--method=scout"])
    assert result.exit_code == 0, result.output
    assert f"{planned} on h200" in " ".join(result.stdout.split())
    assert f"hybrid serve {served} " in result.stdout
    assert result.stderr.count("\n") == (planned != model)
    assert planned == model or f"planned as {planned}" in result.stderr
    assert not list(tmp_path.iterdir()), "nothing is fetched"


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "Qwen/Qwen3.5-9B"])
def test_every_method_is_planned_for_models_with_layers_of_other_kinds(name: str, tmp_path: Path) -> None:
    """At a batch that no GPU holds: requests of ``apex`` are on the CPU, which is not simulated for such models."""
    (tmp_path / "config.json").write_text(json.dumps(CARDS[name].config))
    arguments = ["plan", str(tmp_path / "config.json"), "--context=128k", "--batch=64", "--machine=h200", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--ram=2048GiB"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    assert rows["apex"]["refused"] is None and rows["apex"]["best_tokens_per_s"] is None
    assert rows["scout"]["tokens_per_s"] > 0
