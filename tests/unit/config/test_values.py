"""Valid configurations: defaults, spellings of numbers, sizes, and the JSON that the engines' processes get."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hybrid_backend.config import (
    HybridConfig,
    apply_overrides,
    config_from_mapping,
    format_size,
    iter_keys,
    load_config,
    load_mapping,
    parse_size,
    shipped_configs,
)
from hybrid_backend.errors import ConfigError
from tests.unit.config.refused import refusal

# -- good input ---------------------------------------------------------------------------------------------


def test_an_empty_mapping_is_the_documented_default():
    config = config_from_mapping({}, "test")
    assert config == HybridConfig()
    assert (config.method, config.page_size, config.budget_tokens, config.budget_pages) == (
        "auto",
        32,
        2048,
        64,
    )
    assert config.automatic_frames == 64 + 2 + 1
    assert config.exact_layers == () and config.host_pool.size_bytes is None


def test_a_configuration_cannot_change_and_can_be_a_dictionary_key():
    config = config_from_mapping({"exact_layers": [0, 1], "workers": {"cpus": [0, 2]}}, "test")
    with pytest.raises(ValidationError):
        config.page_size = 64
    with pytest.raises(ValidationError):
        config.recall.enabled = False
    assert {config: 1}[config_from_mapping({"exact_layers": [0, 1], "workers": {"cpus": [0, 2]}}, "other")] == 1


def test_the_smallest_legal_budget_and_slots_are_accepted():
    config = config_from_mapping({"page_size": 16, "budget_tokens": 32, "sinks": 0, "recent": 1}, "test")
    assert config.budget_pages == 2
    assert config_from_mapping({"frames_per_request": 4}, "test").frames_per_request == 4


def test_numbers_may_be_written_as_yaml_1_2_and_json_allow(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("selection: {bound: 1e-1}\nworkers: {deadline_seconds: 5}\n")
    config = load_config(file)
    assert config.selection.bound == 0.1 and config.workers.deadline_seconds == 5.0


def test_recall_interval_is_one_number_or_one_per_layer():
    assert config_from_mapping({"recall": {"intervals": 4}}, "t").recall_interval(99) == 4
    config = config_from_mapping({"recall": {"intervals": [8, 4, 2]}}, "t")
    assert [config.recall_interval(layer) for layer in range(3)] == [8, 4, 2]
    for layer in (3, -1):
        message = refusal(config.recall_interval, layer)
        assert "recall.intervals" in message and f"layer {layer}" in message and "3 intervals" in message


def test_per_layer_keys_that_do_not_fit_the_model_are_refused():
    config = config_from_mapping({"exact_layers": [0, 30, 31], "recall": {"intervals": 8}}, "t")
    config.validate_for(num_layers=32)
    message = refusal(config.validate_for, 30, source="mine.yaml")
    for part in ("mine.yaml: exact_layers", "30", "0..29", "remove [30, 31]"):
        assert part in message
    config = config_from_mapping({"lookahead": {"skip_layers": [1, 30]}}, "t")
    config.validate_for(num_layers=31)
    assert "lookahead.skip_layers: got 30, expected layers 0..29" in refusal(config.validate_for, 30)
    config = config_from_mapping({"recall": {"intervals": [8] * 30}}, "t")
    config.validate_for(30)
    message = refusal(config.validate_for, 32)
    for part in ("recall.intervals", "30", "32", "single integer"):
        assert part in message
    config = config_from_mapping({"budget_factors": [0.5, 1.5]}, "t")
    config.validate_for(2)
    assert "t.yaml: budget_factors: got a list of 2, expected 30" in refusal(config.validate_for, 30, source="t.yaml")


@pytest.mark.parametrize(
    ("windows", "exact"),
    [
        ([None] * 4, (0, 1)),
        ([1024] * 5 + [None] + [1024] * 5 + [None] * 2, (5, 11)),
        ([128, None], (1,)),
    ],
)
def test_automatic_exact_layers_are_the_first_two_without_a_window(windows, exact):
    config = config_from_mapping({"exact_layers": "auto"}, "t").for_layers(windows)
    assert config.exact_layers == exact
    assert [layer for layer in range(len(windows)) if config.is_exact(layer)] == list(exact)
    listed = config_from_mapping({"exact_layers": [0]}, "t")
    assert listed.for_layers(windows) == listed, "layers that are listed stay"


def test_a_shipped_file_says_what_the_default_does_not():
    default = load_mapping(next(path for path in shipped_configs() if path.name == "default.yaml"))
    for path in shipped_configs():
        if path.name != "default.yaml":
            assert {**load_mapping(path), "model": None} != {**default, "model": None}, path.name
            assert "measured" in path.read_text(), f"{path.name} has no line of provenance"


# -- sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("4096", 4096),
        (4096, 4096),
        ("2TiB", 2 << 40),
    ],
)
def test_a_host_pool_size_is_bytes_whatever_its_spelling(text, size):
    config = config_from_mapping({"host_pool": {"size": text}}, "t")
    assert config.host_pool.size == config.host_pool.size_bytes == size


@given(st.integers(min_value=1, max_value=10**18 - 1))
def test_every_size_survives_being_written_and_read(size):
    assert parse_size(format_size(size)) == parse_size(str(size)) == parse_size(size) == size


@given(
    st.integers(1, 2**20),
    st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)]),
    st.booleans(),
)
def test_a_size_with_a_unit_is_that_many_bytes(number, unit, space):
    assert parse_size(f"{number}{' ' * space}{unit[0]}") == number << unit[1]


@given(st.text())
def test_any_text_as_a_size_is_bytes_or_a_one_line_refusal(text):
    try:
        size = config_from_mapping({"host_pool": {"size": text}}, "t").host_pool.size_bytes
    except ConfigError as error:
        assert "host_pool.size" in str(error) and len(str(error).splitlines()) == 1
    else:
        assert size is None or size > 0


# -- as it is handed to the engines' processes ---------------------------------------------------------------
# vLLM makes the same JSON part of its compile-cache key.


@pytest.mark.parametrize("path", shipped_configs(), ids=lambda path: path.name)
def test_the_json_of_a_configuration_loads_back_to_the_same(path):
    config = load_config(path)
    assert config_from_mapping(json.loads(config.model_dump_json()), "t") == config


def test_the_json_depends_on_the_content_only():
    same = [{}, {"sinks": 1, "page_size": 32}, {"page_size": 32, "sinks": 1}, {"model": {"match": ["*"]}}]
    same += [{"workers": {"deadline_seconds": 30}}, {"exact_layers": []}]
    assert {config_from_mapping(mapping, "t").model_dump_json() for mapping in same} == {
        HybridConfig().model_dump_json()
    }
    sizes = [{"host_pool": {"size": size}} for size in ("8GiB", "8192MiB", 8 << 30)]
    assert len({config_from_mapping(mapping, "t").model_dump_json() for mapping in sizes}) == 1


CHANGES = [
    "whole_layers=[]",
    "model.match=foo",
    "method=dense",
    "page_size=64",
    "kv_dtype=int8",
    "budget_tokens=1024",
    "sinks=2",
    "recent=1",
    "sparse=always",
    "frames_per_request=99",
    "exact_layers=[0]",
    "selection.granularity=kv_head",
    "selection.aggregate=max",
    "selection.candidates=0",
    "selection.interval=4",
    "selection.bound=1",
    "workers.numa=0",
    "selection.digest=minmax",
    "staging_tokens=64",
    "hgca.window_tokens=64",
    "hgca.beta=0.5",
    "hgca.alpha=0.5",
    "headinfer.group_thresholds=[64]",
    "headinfer.resident_heads=['1:1']",
    "headinfer.window_heads=['1:1']",
    "headinfer.window_tokens=128",
    "clo.eta=0.5",
    "clo.power=2",
    "clo.tolerance=0.05",
    "clo.aggregate=min",
    "clo.heads=heads.json",
    "clo.persistent=['1:1']",
    "apex.strategy=lockstep",
    "apex.device_tokens=4096",
    "apex.min_cpu_per_gpu=8",
    "apex.hardware=h100",
    "lookahead.enabled=false",
    "lookahead.partial_query=real",
    "lookahead.skip_layers=[1]",
    "recall.enabled=false",
    "recall.intervals=[1, 2]",
    "budget_factors=[1, 2]",
    "device_kernels=torch",
    "workers.kernel=torch",
    "workers.threads=2",
    "workers.cpus=[0, 1]",
    "workers.deadline_seconds=1",
    "host_pool.size=1GiB",
    "metrics.sample_interval=0",
    "quality.min_mass=0.98",
    "quality.max_kl=0.01",
]


def test_changing_any_key_changes_the_json():
    changed = {change.partition("=")[0] for change in CHANGES}
    assert changed == {key for key, _ in iter_keys()}
    found = {config_from_mapping(apply_overrides({}, [change]), "t").model_dump_json() for change in CHANGES}
    assert len(found | {HybridConfig().model_dump_json()}) == len(CHANGES) + 1
