"""Bad configurations are refused in one line that names the file, the key, the value and the fix."""

from __future__ import annotations

import time

import pytest

from hybrid_backend.config import (
    config_from_mapping,
    load_config,
)
from tests.unit.config.refused import refusal

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
