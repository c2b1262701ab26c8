"""What hybrid_backend.config promises to the people who write YAML and to the code that reads it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hybrid_backend.config import (
    HybridConfig,
    Rule,
    apply_overrides,
    config_from_mapping,
    find_config,
    format_size,
    iter_keys,
    load_config,
    load_mapping,
    parse_size,
    resolve_config,
    shipped_configs,
)
from hybrid_backend.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"

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


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# -- bad input: one line that names the file, the key, the value and the way out ----------------------------

# YAML text -> what the line must contain: the key, the value, the fix
BAD = [
    # types and ranges
    ("page_size: 48", ["page_size", "48", "one of 16, 32, 64, 128"]),
    ("page_size: '32'", ["page_size", "'32'", "one of 16, 32, 64, 128"]),
    ("page_size: 32.0", ["page_size", "32.0", "one of 16"]),
    ("page_size: true", ["page_size", "true", "one of 16"]),
    ("page_size:", ["page_size", "null", "one of 16"]),
    ("sinks: -1", ["sinks", "-1", "an integer >= 0"]),
    ("recent: 0", ["recent", "0", "an integer >= 1"]),
    ("budget_tokens: 2k", ["budget_tokens", "'2k'", "an integer >= 16"]),
    ("method: Scout", ["method", "'Scout'", "a lowercase method name such as scout"]),
    ("sparse: alway", ["sparse", "'alway'", "auto, always, never", "did you mean always?"]),
    ("sparse: false", ["sparse", "false", "auto, always, never"]),
    ("sparse: both", ["sparse", "'both'", "auto, always, never"]),
    ("frames_per_request: all", ["frames_per_request", "'all'", "auto, or an integer >= 1"]),
    ("frames_per_request: 9223372036854775807", ["frames_per_request", "9223372036854775807", "at most 2147483647"]),
    ("frames_per_request: AUTO", ["frames_per_request", "'AUTO'", "did you mean auto?"]),
    ("exact_layers: first", ["exact_layers", "'first'", "auto, or a sorted list"]),
    ("{exact_layers: auto, whole_layers: [0]}", ["whole_layers", "[0]", "layers that exact_layers lists"]),
    ("exact_layers: 3", ["exact_layers", "3", "list, each item an integer >= 0"]),
    ("exact_layers: [0, -2]", ["exact_layers[1]", "-2", "an integer >= 0"]),
    ("exact_layers: [2, 0]", ["exact_layers", "[2, 0]", "sorted", "write [0, 2]"]),
    ("exact_layers: [1, 1, 0]", ["exact_layers", "[1, 1, 0]", "no item twice", "write [0, 1]"]),
    ("model: {match: []}", ["model.match", "[]", "a name pattern"]),
    ("model: {match: ['a', '']}", ["model.match[1]", "''", "a name pattern"]),
    ("model: {match: 7}", ["model.match", "7", "a name pattern"]),
    ("selection: {granularity: head}", ["selection.granularity", "'head'", "layer, kv_head", "did you mean"]),
    ("selection: {digest: mean}", ["selection.digest", "'mean'", "minmax"]),
    ("selection: {aggregate: 1}", ["selection.aggregate", "1", "sum, max"]),
    ("staging_tokens: 8", ["staging_tokens", "8", "an integer >= 16"]),
    ("hgca: {beta: 0}", ["hgca.beta", "0", "a number > 0"]),
    ("hgca: {alpha: 1.5}", ["hgca.alpha", "1.5", "a number > 0 and <= 1"]),
    ("headinfer: {group_thresholds: []}", ["headinfer.group_thresholds", "[]", "non-empty"]),
    ("clo: {eta: 1.5}", ["clo.eta", "1.5", "a number > 0 and <= 1"]),
    ("clo: {persistent: all}", ["clo.persistent", "'all'", "one of auto, none"]),
    ("clo: {persistent: ['3']}", ["clo.persistent[0]", "'3'", "layer:head such as 3:1"]),
    ("clo: {heads: ''}", ["clo.heads", "uniform"]),
    ("apex: {strategy: pipeline}", ["apex.strategy", "'pipeline'", "one of auto, gpu, lockstep, overlap"]),
    ("apex: {device_tokens: 0}", ["apex.device_tokens", "got 0", "an integer >= 16"]),
    ("headinfer: {resident_heads: ['3']}", ["headinfer.resident_heads[0]", "'3'", "layer:head such as 3:1"]),
    ("lookahead: {enabled: 1}", ["lookahead.enabled", "1", "true or false"]),
    ("lookahead: {partial_query: reel}", ["lookahead.partial_query", "'reel'", "did you mean real?"]),
    ("selection: {bound: 0}", ["selection.bound", "0", "a number > 0 and <= 1"]),
    ("selection: {bound: 12%}", ["selection.bound", "'12%'", "a number > 0 and <= 1"]),
    ("selection: {bound: .nan}", ["selection.bound", "NaN", "a number > 0 and <= 1"]),
    ("budget_factors: [1, 0]", ["budget_factors[1]", "0", "a number > 0 and <= 16"]),
    ("budget_factors: 2", ["budget_factors", "2", "a list"]),
    ("recall: {intervals: 0}", ["recall.intervals", "0", "an integer >= 1"]),
    ("recall: {intervals: []}", ["recall.intervals", "[]", "non-empty list"]),
    ("recall: {intervals: [8, 8, 0]}", ["recall.intervals[2]", "0", "an integer >= 1"]),
    ("recall: {intervals: [[8]]}", ["recall.intervals[0]", "[8]", "an integer >= 1"]),
    ("workers: {kernel: AVX 512}", ["workers.kernel", "'AVX 512'", "lowercase kernel name"]),
    ("workers: {threads: 0}", ["workers.threads", "0", "auto, or an integer >= 1"]),
    ("workers: {cpus: 0-7}", ["workers.cpus", "'0-7'", "list, each item an integer >= 0"]),
    ("workers: {cpus: [0, 0]}", ["workers.cpus", "[0, 0]", "write [0]"]),
    ("workers: {deadline_seconds: .inf}", ["workers.deadline_seconds", "Infinity", "a number > 0"]),
    ("host_pool: {size: 8GB}", ["host_pool.size", "'8GB'", "such as 8GiB", "write 8GiB"]),
    ("host_pool: {size: 0}", ["host_pool.size", "0", "a size > 0"]),
    ("host_pool: {size: -8GiB}", ["host_pool.size", "'-8GiB'", "a size > 0"]),
    ("host_pool: {size: 0.3}", ["host_pool.size", "0.3", "a size > 0"]),
    ("metrics: {sample_interval: -1}", ["metrics.sample_interval", "-1", "an integer >= 0"]),
    # keys that do not fit each other
    ("budget_tokens: 2050", ["budget_tokens", "2050", "a multiple of page_size 32", "write 2048 or 2080"]),
    ("budget_tokens: 96", ["budget_tokens", "96", "more than the sinks 1 + recent 2", "write 128 or more"]),
    ("{page_size: 128, budget_tokens: 130}", ["budget_tokens", "130", "multiple", "write 512"]),
    ("frames_per_request: 3", ["frames_per_request", "3", "sinks 1 + recent 2 + 1", "write 4 or more"]),
    # keys that do not exist
    ("page_sise: 32", ["'page_sise'", "unknown key", "did you mean page_size?"]),
    ("recall: {intervalls: 4}", ["recall.intervalls", "'intervalls'", "did you mean intervals?"]),
    ("intervals: 4", ["'intervals'", "did you mean recall.intervals?"]),
    ("recall: {threshold: 0.1}", ["recall.threshold: unknown key", "recall has the keys enabled, intervals"]),
    ("enabled: true", ["'enabled'", "did you mean lookahead.enabled or recall.enabled?"]),
    ("metrics: {zzz: 1}", ["metrics.zzz", "'zzz'", "metrics has the keys sample_interval"]),
    ("32: page_size", ["32", "unknown key", "write a name"]),
    ("recall: {1: 2}", ["recall.1", "unknown key", "write a name"]),
    # sections that are not mappings
    ("recall: 5", ["recall", "5", "a mapping with any of the keys enabled, intervals"]),
    ("recall:", ["recall", "null", "a mapping with any of the keys"]),
    ("host_pool: 8GiB", ["host_pool", "'8GiB'", "a mapping with any of the keys size"]),
    # files that are not configurations
    ("- page_size", ['["page_size"]', "expected a mapping"]),
    ("scout", ["'scout'", "expected a mapping"]),
    ("", ["is empty", "method: scout"]),
    ("# nothing\n", ["is empty"]),
    ("sinks: 1\nsinks: 2", ["line 2", "'sinks'", "written twice; keep one"]),
    ("recall: {enabled: true, enabled: false}", ["line 1", "'enabled'", "written twice"]),
    ("recall: {enabled: true", ["line 1", "expected ',' or '}'"]),
    ("a: b: c", ["line 1", "mapping values are not allowed"]),
    ("page_size: !!python/object:os.system 1", ["line 1, column 12: tag '!!python/object:os.system'", "without a tag"]),
    ("page_size: \x07", ["not valid YAML"]),
    ("x: 2024-99-99", ["not valid YAML", "month"]),
    ("[" * 3000, ["line 1, column 33", "more than 32 brackets in each other"]),
    ("- " * 3000, ["not valid YAML (nested too deeply)"]),
    ("x: &a {y: *a}", ["'x'", "unknown key"]),
    ("sinks: !!bool 1", ["line 1, column 8: tag '!!bool'", "write the value without a tag"]),
    ("sinks: !!timestamp x", ["line 1, column 8: tag '!!timestamp'"]),
    ("sinks: !!omap [a: 1]", ["line 1, column 8: tag '!!omap'"]),
    ("sinks: !!int ''", ["line 1, column 8: tag '!!int'"]),
    ("sinks: !!float ''", ["line 1, column 8: tag '!!float'"]),
    ("sinks: 0x_", ["not valid YAML"]),
    ("sinks: 2147483647", ["sinks", "2147483647", "write 67108860 or less"]),
    ("workers: {threads: 2147483647}", ["workers.threads", "2147483647", "at most 1024"]),
    ("workers: {deadline_seconds: 1.0e+308}", ["workers.deadline_seconds", "1e+308", "<= 86400"]),
    ("#" * 200_000, ["larger than 131072 bytes"]),
    ("sinks: 0x" + "f" * 9000, ["sinks", "a value of type int", "an integer >= 0"]),  # too long to print
    ("host_pool: {size: 99999999999TiB}", ["host_pool.size", "'99999999999TiB'", "a size > 0"]),
]


@pytest.mark.parametrize(("text", "parts"), BAD, ids=[repr(text)[:40] for text, _ in BAD])
def test_a_bad_file_is_refused_in_one_line_that_names_file_key_value_and_fix(tmp_path, text, parts):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    message = refusal(load_config, file)
    assert message.startswith(str(file))
    assert "\n" not in message and "pydantic" not in message.lower() and len(message) < 500
    for part in parts:
        assert part in message, message


REPEATED = {
    "aliases": "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
    "merges": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30)),
}
"""Texts of a few hundred bytes that stand for gigabytes."""


@pytest.mark.parametrize("kind", REPEATED)
def test_a_text_that_repeats_itself_without_end_is_refused_at_once(kind):
    started = time.process_time()
    message = refusal(load_config, "{" + REPEATED[kind].replace("\n", ", ") + "}")
    assert "more than 16 aliases" in message and "write the values" in message and len(message) < 300
    assert time.process_time() - started < 2


def test_a_few_aliases_and_merges_are_read():
    text = "{recall: &r {enabled: false}, lookahead: {<<: *r}}"
    config = load_config(text)
    assert config.recall.enabled is config.lookahead.enabled is False


def test_a_value_is_printed_in_a_bounded_length_and_time():
    wide = ["x" * 1000]
    for _ in range(40):  # 2^40 words, if all of them are spelled
        wide = [wide, wide]
    started = time.process_time()
    for value in (wide, {"a": wide}, ("a", {1: wide, None: wide}), {"x" * 10**7}, [b"x" * 10**6]):
        message = refusal(config_from_mapping, {"sinks": value}, "t")
        assert "sinks: got" in message and len(message) < 200
    assert time.process_time() - started < 2


def test_what_cannot_be_printed_is_escaped():
    message = refusal(config_from_mapping, {"\x1b[31m\ud800": 1}, "t")
    assert message.isprintable() and "x1b" in message


def test_several_problems_show_the_first_and_count_the_others():
    bad = {"page_size": 48, "recall": {"enabled": 2, "intervals": 0}, "sink": 1}
    message = refusal(config_from_mapping, bad, "mine.yaml")
    assert message.startswith("mine.yaml: page_size: got 48") and message.endswith("(and 3 more problems)")
    one_more = refusal(config_from_mapping, {"page_size": 48, "sink": 1}, "mine.yaml")
    assert one_more.endswith("(and 1 more problem)")
    assert "more problem" not in refusal(config_from_mapping, {"page_size": 48}, "mine.yaml")


def test_a_missing_an_unreadable_and_a_binary_file_are_one_line_each(tmp_path):
    missing = refusal(load_config, tmp_path / "absent.yaml")
    assert "absent.yaml: no such file" in missing
    folder = refusal(load_config, tmp_path)
    assert "cannot be read" in folder and "directory" in folder
    binary = tmp_path / "weights.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    assert "weights.yaml: not UTF-8 text" in refusal(load_config, binary)
    assert "the path is empty" in refusal(load_config, "")
    assert "cannot be read" in refusal(load_config, "a\0b")


def test_a_configuration_that_is_not_a_mapping_is_refused():
    assert "expected a mapping" in refusal(config_from_mapping, ["page_size"], "mine")


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


# -- documentation ------------------------------------------------------------------------------------------


def documented_row(key, field) -> str:
    meaning, _, source = " ".join(field.description.split()).partition(" Source: ")
    default = json.dumps(field.default) if not isinstance(field.default, str) else field.default
    default = "[]" if field.default == () else default
    cells = [
        f"`{key}`",
        f"`{default}`",
        next(item for item in field.metadata if isinstance(item, Rule)).allowed.replace("*", r"\*"),
        meaning,
        source.rstrip("."),
    ]
    return "| " + " | ".join(cells) + " |"


def test_the_documentation_lists_every_key_default_range_meaning_and_source():
    expected = [documented_row(key, field) for key, field in iter_keys()]
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == expected, "docs/reference/configuration.md should hold:\n" + "\n".join(expected)


def test_every_key_says_what_it_means_and_where_its_default_comes_from():
    for key, field in iter_keys():
        assert field.description and " Source: " in " ".join(field.description.split()), key


def test_the_examples_in_the_documentation_are_valid():
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        config_from_mapping(yaml.safe_load(block), "docs/reference/configuration.md")


@pytest.mark.parametrize(
    "text",
    [
        "page_size: 48",
        "recall: {intervalls: 4}",
        "budget_tokens: 2050",
        "a: 1\nb: 1\nc: 1\nd: 1\ne: 1\nsinks: 1\nsinks: 2",
        "page_size: 48\nsinks: -1\nrecent: 0",
    ],
)
def test_the_documented_error_lines_are_the_real_ones(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text)
    assert f"    {refusal(load_config, 'my.yaml')}\n" in DOCS.read_text()
