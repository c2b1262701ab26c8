"""Overrides, and the file that a model's configuration is read from."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.config import (
    apply_overrides,
    config_from_mapping,
    find_config,
    iter_keys,
    load_config,
    load_mapping,
    resolve_config,
    shipped_configs,
)
from hybrid_backend.errors import ConfigError
from tests.unit.config.refused import refusal

SHIPPED_FOR = {
    "smollm2-135m.yaml": (
        30,
        [
            "HuggingFaceTB/SmolLM2-135M",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "/models/smollm2-135m-instruct/",
            "/cache/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/0e9e39f249a16976",
        ],
    ),
    "qwen2.5-coder-0.5b.yaml": (24, ["Qwen/Qwen2.5-Coder-0.5B-Instruct", "qwen2.5-coder-0.5b-instruct"]),
    "default.yaml": (
        64,
        [
            "meta-llama/Llama-3.1-8B-Instruct",
            "Qwen/Qwen3-14B-AWQ",
            "Qwen/Qwen2.5-0.5B",
            "HuggingFaceTB/SmolLM2-1.7B",
            "/cache/hub/models--openai--gpt-oss-20b/snapshots/0e9e39f249a16976",
            "",
        ],
    ),
}


# -- overrides ----------------------------------------------------------------------------------------------


def test_overrides_set_dotted_keys_and_leave_the_original_alone():
    original = {"sinks": 3, "recall": {"intervals": 4}}
    result = apply_overrides(original, ["budget_tokens=1024", "recall.enabled=false", "sinks=0", "sinks=2"])
    assert result == {"sinks": 2, "budget_tokens": 1024, "recall": {"intervals": 4, "enabled": False}}
    assert original == {"sinks": 3, "recall": {"intervals": 4}}
    assert apply_overrides({}, ["recall={enabled: false}"]) == {"recall": {"enabled": False}}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("budget_tokens", ["'budget_tokens'", "expected key=value"]),
        ("budget_tokens=", ["'budget_tokens='", "expected key=value"]),
        ("=5", ["'=5'", "expected key=value"]),
        (
            "recal.enabled=false",
            ["recal.enabled: unknown key 'recal'; did you mean lookahead.enabled or recall.enabled?"],
        ),
        ("workrs.thread=3", ["workrs.thread: unknown key 'workrs'; did you mean workers?"]),
        ("other.threads=3", ["other.threads: unknown key 'other'; did you mean workers.threads?"]),
        ("recall.enable=false", ["recall.enable", "unknown key", "did you mean enabled?"]),
        ("page_size.x=1", ["page_size.x: unknown key 'x'; did you mean page_size?"]),
        ("exact_layers=[0", ["exact_layers", "'[0'", "a YAML value"]),
        ("sinks=!!bool 1", ["sinks", "'!!bool 1'", "a YAML value", "write the value without a tag"]),
        ("sinks=!!timestamp x", ["sinks", "'!!timestamp x'", "without a tag"]),
        ("sinks=!!omap [a: 1]", ["sinks", "'!!omap [a: 1]'", "without a tag"]),
        ("sinks=[&a [1], *a" + ", *a" * 16 + "]", ["sinks", "more than 16 aliases"]),
    ],
)
def test_a_bad_override_is_refused_in_one_line(override, parts):
    message = refusal(apply_overrides, {}, [override])
    assert message.startswith("--set ") and "\n" not in message
    for part in parts:
        assert part in message, message


def test_a_head_is_text_in_files_and_overrides_not_a_number_in_base_60(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("headinfer: {resident_heads: [3:1, 10:05]}")
    set_ = config_from_mapping(apply_overrides({}, ["headinfer.resident_heads=[3:1, 10:05]"]), "t")
    assert load_config(file).headinfer.resident_heads == set_.headinfer.resident_heads == ("3:1", "10:05")


def test_a_wrong_value_in_an_override_is_refused_like_one_in_a_file():
    message = refusal(resolve_config, "any", {}, {}, ["selection.bound=2"])
    for part in ("--set", "selection.bound", "got 2", "a number > 0 and <= 1"):
        assert part in message


@given(
    st.dictionaries(st.sampled_from(["sinks", "recent", "metrics.sample_interval"]), st.integers(1, 20), max_size=3),
    st.integers(min_value=100, max_value=10_000),
    st.booleans(),
)
def test_overrides_reach_the_configuration(numbers, pages, enabled):
    overrides = [f"{key}={value}" for key, value in numbers.items()]
    overrides += [f"budget_tokens={pages * 32}", f"lookahead.enabled={json.dumps(enabled)}"]
    config = config_from_mapping(apply_overrides({}, overrides), "t")
    assert config.budget_pages == pages and config.lookahead.enabled is enabled
    for key, value in numbers.items():
        section, _, name = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, name) == value


@given(st.sampled_from([key for key, _ in iter_keys()]) | st.text(), st.text())
def test_any_override_is_applied_or_refused_in_one_line(key, value):
    try:
        config_from_mapping(apply_overrides({}, [f"{key}={value}"]), "--set")
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


# -- which file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "model"), [(file, model) for file, (_, models) in SHIPPED_FOR.items() for model in models]
)
def test_a_model_finds_its_shipped_file_by_id_directory_or_cache_path(file, model):
    assert find_config(model).name == file
    assert find_config(model.lower()).name == file


def test_every_shipped_file_is_listed_here_loads_and_fits_its_model():
    assert {path.name for path in shipped_configs()} == set(SHIPPED_FOR)
    for path in shipped_configs():
        config = load_config(path)
        config.validate_for(SHIPPED_FOR[path.name][0], source=path.name)
        assert config.sparse == "auto" and config.method == "auto"


def test_every_number_in_a_shipped_file_names_its_source():
    for path in shipped_configs():
        for line in path.read_text().splitlines():
            if re.match(r"\s*\w+: \[?\d", line):
                assert re.search(r"# .*(arXiv|measured|default)", line), f"{path.name}: {line}"


def test_the_most_specific_pattern_wins(tmp_path, monkeypatch):
    for name, match in {
        "default": "*",
        "broad": "*llama*",
        "narrow": "*llama-3.1-8b*",
        "other": "qwen*",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"model": {"match": match}}))
    monkeypatch.setattr("hybrid_backend.config.load.importlib.resources.files", lambda package: tmp_path)
    assert find_config("meta-llama/Llama-3.1-8B").stem == "narrow"
    assert find_config("meta-llama/Llama-3.2-1B").stem == "broad"
    assert find_config("Qwen/Qwen3-8B").stem == "other"
    assert find_config("unknown").stem == "default"
    (tmp_path / "default.yaml").unlink()
    assert "default.yaml is not installed; reinstall" in refusal(find_config, "unknown")


def test_explicit_wins_over_the_environment_over_the_name_over_the_default(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("sinks: 5")
    model, env = "HuggingFaceTB/SmolLM2-135M-Instruct", {"HYBRID_CONFIG": str(file)}

    config, source = resolve_config(model, {"sinks": 7}, env)
    assert (config.sinks, source) == (7, "explicit (mapping)")
    config, source = resolve_config(model, file, {"HYBRID_CONFIG": "{sinks: 6}"})
    assert (config.sinks, source) == (5, f"{file} (explicit)")
    assert resolve_config(model, '{"sinks": 8}', env)[0].sinks == 8
    config, source = resolve_config(model, None, env)
    assert (config.sinks, source) == (5, f"{file} (HYBRID_CONFIG)")
    config, source = resolve_config(model, None, {"HYBRID_CONFIG": ' {\n\t"sinks":\t6}'})
    assert (config.sinks, source) == (6, "HYBRID_CONFIG (inline)")
    for unset in ({}, {"HYBRID_CONFIG": " "}):
        config, source = resolve_config(model, None, unset)
        assert config.exact_layers == (7, 8, 17, 18) and "smollm2-135m.yaml" in source and model in source
    config, source = resolve_config("acme/unheard-of", None, {})
    assert config.exact_layers == "auto" and "default.yaml (no shipped file matches acme/unheard-of)" in source


def test_a_bad_configuration_is_refused_with_where_it_came_from(tmp_path):
    assert "x.yaml (HYBRID_CONFIG): no such file" in refusal(resolve_config, "m", None, {"HYBRID_CONFIG": "x.yaml"})
    inline = refusal(resolve_config, "m", None, {"HYBRID_CONFIG": '{"sinks": 1, "sinks": 2}'})
    assert inline.startswith("HYBRID_CONFIG (inline): line 1") and "written twice" in inline
    assert "the path is empty" in refusal(resolve_config, "m", "", {})
    assert "explicit (mapping) with --set: got 5" in refusal(resolve_config, "m", 5, {}, ["sinks=1"])


def test_overrides_come_last():
    config, source = resolve_config("SmolLM2-135M", None, {}, ["exact_layers=[0]", "selection.bound=0.25"])
    assert config.exact_layers == (0,) and config.selection.bound == 0.25 and config.recall.intervals == 8
    assert source.endswith("with --set")


def test_load_mapping_gives_what_the_file_says_unchecked(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("anything: [1, 2]")
    assert load_mapping(file) == load_mapping("{anything: [1, 2]}") == {"anything": [1, 2]}
