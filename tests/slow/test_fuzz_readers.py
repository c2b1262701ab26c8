"""Every reader of a file or an argument reads damaged content, or refuses it in one line that names the file.

Content is damaged in two ways: bytes are changed, cut out, repeated and inserted; and values of a JSON text are
replaced.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hybrid_backend.config import (
    apply_overrides,
    config_from_mapping,
    iter_keys,
    load_config,
    read_heads,
    shipped_configs,
)
from hybrid_backend.errors import HybridError
from hybrid_backend.hardware import find_hardware
from hybrid_backend.model import weights_to_load
from hybrid_backend.model_layers import has_delta_nets, is_quantised
from hybrid_backend.tools.bench.accuracy import read_prompts
from hybrid_backend.tools.hub import fetch, find_entry, resolve_model
from hybrid_backend.tools.hub.fetch import CONVERTER_VERSION, MANIFEST
from hybrid_backend.tools.plan.command import memory, tokens
from hybrid_backend.tools.plan.model import find_shape
from hybrid_backend.tools.profile.gates import GateState
from hybrid_backend.tools.profile.store import Store
from hybrid_backend.tools.profile.texts import read_texts

SECONDS = 3
"""Longest time of one example, which takes milliseconds."""
EXAMPLES = 100
FOLDER = "smollm2-135m-instruct"
"""Name of the folder that a reader gets: a catalog model's, as fetching reads one."""

# --- damage ---

TOKENS = [
    b"", b"\0", b"\xff\xfe", b"\x1b[31m", b"[" * 5000, b"{" * 3000, b'{"a":' * 3000, b"9" * 5000, b"1e308",
    b"-1", b"1e999", b"NaN", b"null", b"true",
    b'"\\ud800"', b"!!bool 1", b"&a [*a, *a]", b"<<: {x: 1}", b"\n", b"\t", b"2147483647",
    b"9223372036854775808", b"\xff" * 8, b"\0" * 8,
]  # fmt: skip


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` with one to four places changed."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(damaged)))
        last = min(len(damaged), first + draw(st.sampled_from([0, 1, 1, 4, 64])))
        damaged[first:last] = draw(
            st.sampled_from(TOKENS) | st.binary(max_size=4) | st.just(bytes(damaged[first:last]) * 3)
        )
    return bytes(damaged[: draw(st.sampled_from([len(damaged)] * 3 + [len(damaged) // 2]))])


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


VALUES = st.sampled_from(
    [None, True, False, 0, -1, 2**31 - 1, 2**31, 2**63, 10**400, 1e308, -1e308, 0.5, float("nan"), float("inf"), "",
     "x", "\ud800", "x" * 5000, [], {}, [[]], [0], ["x"], [None], {"x": 1}, {"": {}}, nested(50)]
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


@st.composite
def damaged_json(draw: st.DrawFn, value: Any) -> bytes:
    """``value`` as JSON, with one to three values replaced, removed or added."""
    damaged = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(damaged)[1:] or [("x",)]))
        inner = damaged
        for key in path:
            inner = inner[key]
        if not isinstance(inner, dict | list):
            continue
        if draw(st.booleans()) or isinstance(inner, list):
            inner[last] = deepcopy(draw(VALUES))
        elif draw(st.booleans()):
            inner.pop(last, None)
        else:
            inner[draw(st.text(max_size=5))] = deepcopy(draw(VALUES))
    return json.dumps(damaged).encode()


# --- readers ---


class Reader(NamedTuple):
    """A reader of one file. ``seed``: its right content, bytes or a JSON value; ``read`` gets a folder of its own."""

    file: str
    seed: Any
    read: Callable[[Path], object]
    beside: Mapping[str, Any] = MappingProxyType({})
    named: str = ""  # in every refusal; empty: the file


CONFIG_JSON = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "torch_dtype": "bfloat16",
    "sliding_window": 32,
    "max_position_embeddings": 512, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "layer_types": ["full_attention", "sliding_attention", "linear_attention", "full_attention"],
    "mlp_only_layers": [0], "first_k_dense_replace": 1, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 4, "tie_word_embeddings": True,
    "text_config": {"hidden_size": 64}, "quantization_config": {},
}  # fmt: skip
INDEX = {"metadata": {"total_size": 1000}, "weight_map": {"a": "model.safetensors"}}
HEADER = {"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
SAFETENSORS = struct.pack("<Q", len(json.dumps(HEADER))) + json.dumps(HEADER).encode() + b"\0" * 8
HEADS = {
    "model": "m", "importance": [[0.5, 1.0]] * 2, "kv_importance": [[0.5]] * 2, "similarity": [[0.9]] * 2,
    "prefetch_bytes": 1,
}  # fmt: skip
LAYER = {
    **{"layer": 0, "cosine": None, "mass": 0.9, "ratios": {"8": 0.1}, "similarity": [0.9]},
}
STAGES = {
    "format": 1,
    "stages": {
        "divergence:0": {"label": "text", "sparse": [[0]], "kl": [0.5]},
        "window:0": {"label": "text @0 +8", "layers": [LAYER]},
        "gates:0": {
            "label": "kv_head",
            "state": GateState(step=1, gates=[[1.0]], first=[[0.0]], second=[[0.0]], losses=[1.0]).model_dump(),
        },
    },
}
PROMPTS = b'{"prompt": "Who wrote it?"}\n{"messages": [{"role": "user", "content": "Who?"}]}\n'


class Words:
    """A tokenizer of words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages: Any, **_: bool) -> str:
        return "".join(message["content"] for message in messages)


def read_config_json(folder: Path) -> None:
    """Read a mapping as an engine hands it over, whatever is in it."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError):
        return
    if isinstance(config, dict):
        is_quantised(config)
        has_delta_nets(config)
        weights_to_load(str(folder), config, "bfloat16")


def read_stages(folder: Path) -> None:
    store = Store(folder / "m.json")
    for key in STAGES["stages"]:
        store.get(key)


def read_manifest(folder: Path) -> None:
    def refuse(*_: object) -> None:
        raise HybridError(f"{MANIFEST}: is made anew")

    fetch(find_entry(FOLDER).name, folder.parent, download=refuse)


READERS = {
    "configuration": Reader("c.yaml", shipped_configs()[-1].read_bytes(), lambda f: load_config(f / "c.yaml")),
    "configuration, JSON": Reader(
        "c.yaml",
        config_from_mapping({}, "t").model_dump(mode="json"),
        lambda f: load_config(f / "c.yaml"),
    ),
    "heads": Reader("h.json", HEADS, lambda f: read_heads(f / "h.json", 2, 2, 1)),
    "hardware": Reader("a.json", json.loads(find_hardware("a10").to_json()), lambda f: find_hardware(f / "a.json")),
    "config.json": Reader("config.json", CONFIG_JSON, lambda f: find_shape(str(f))),
    "config.json of an engine": Reader("config.json", CONFIG_JSON, read_config_json),
    "index": Reader("model.safetensors.index.json", INDEX, lambda f: find_shape(str(f)), {"config.json": CONFIG_JSON}),
    "safetensors": Reader("model.safetensors", SAFETENSORS, lambda f: find_shape(str(f)), {"config.json": CONFIG_JSON}),
    "manifest": Reader(
        MANIFEST,
        {"gguf_sha256": find_entry(FOLDER).sha256, "converter_version": CONVERTER_VERSION,
         "files": {"config.json": 2}},
        read_manifest,
        {"config.json": {}},
    ),
    "stored profile": Reader("m.json", STAGES, read_stages),
    "prompts": Reader("p.jsonl", PROMPTS, lambda f: read_prompts(f / "p.jsonl", Words())),
    "text": Reader("t.txt", b"Anna wrote it.", lambda f: read_texts("--text", [f / "t.txt"])),
}  # fmt: skip


def damaged(seed: Any) -> st.SearchStrategy[bytes]:
    if isinstance(seed, bytes):
        return damaged_bytes(seed)
    return damaged_json(seed) | damaged_bytes(json.dumps(seed).encode())


def written(folder: Path, file: str, content: Any) -> None:
    (folder / file).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def check_refusal(error: HybridError, name: str) -> None:
    message = str(error)
    assert "\n" not in message and message.isprintable() and len(message) < 1500, message[:1500]
    assert name in message, message


few = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[phase for phase in Phase if phase != Phase.explain],  # traces every line, which takes most of the time
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_line_that_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reader = READERS[name]
    folder = tmp_path / FOLDER
    folder.mkdir()
    for file, content in reader.beside.items():
        written(folder, file, content)
    written(folder, reader.file, reader.seed)
    reader.read(folder)  # the right content is read

    @few
    @given(damaged(reader.seed))
    def check(content: bytes) -> None:
        written(folder, reader.file, content)
        try:
            reader.read(folder)
        except HybridError as error:
            check_refusal(error, reader.named or reader.file)

    check()


WORDS = st.text(max_size=20) | st.sampled_from([token.decode("utf-8", "surrogateescape") for token in TOKENS])
VALUES_OF_KEYS = WORDS | st.integers().map(str) | st.floats().map(str) | VALUES.map(repr) | st.sampled_from(
    ["[" * 500, "{a: " * 500, "&a [*a]", "!!set {1}", "!!binary x", "2024-99-99", "0x_", "._", "=", "<<", "? ? ?"]
)  # fmt: skip


@settings(few, max_examples=4 * EXAMPLES)
@given(st.sampled_from([key for key, _ in iter_keys()] + ["model", "workers"]) | WORDS, VALUES_OF_KEYS)
def test_any_override_is_read_or_refused(key: str, value: str) -> None:
    try:
        config_from_mapping(apply_overrides({}, [f"{key}={value}"]), "with --set")
    except HybridError as error:
        check_refusal(error, "--set")


@few
@given(WORDS, st.sampled_from([resolve_model, find_hardware, tokens, partial(memory, "--ram"), load_config]))
def test_any_argument_is_read_or_refused(word: str, read: Callable[[str], object]) -> None:
    try:
        read(word)
    except HybridError as error:
        check_refusal(error, "")
