"""MODEL on the command line becomes a shape, and its weights' bytes are counted, not guessed."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hybrid_backend.errors import ModelError
from hybrid_backend.model import spec_of, weight_bytes
from hybrid_backend.tools.plan.model import find_shape

CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100, "torch_dtype": "bfloat16",
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_the_demo_model_is_as_large_as_its_tensors(model_dir: Path) -> None:
    shape = find_shape("smollm2-135m-instruct")
    with safe_open(model_dir / "model.safetensors", "pt") as file:
        tensors = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert shape.weight_bytes == tensors
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype) == (30, 3, 64, "bfloat16")
    assert replace(find_shape(str(model_dir)), name=shape.name) == shape
    assert find_shape("smollm2-135m-instruct", "float32").weight_bytes == 2 * tensors


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "tiny")
    shape = find_shape(str(folder / "config.json"))
    assert shape.name == "tiny"
    layer = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96
    assert shape.weight_bytes == 2 * (2 * layer + 100 * 64 + 5 * 64)
    renamed = tmp_path / "other.json"
    renamed.write_text((folder / "config.json").read_text())
    assert find_shape(str(renamed)).layers == 2


def test_floats_take_the_engines_type_and_the_rest_its_own(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(10, dtype=torch.float32), "b": torch.zeros(6, dtype=torch.bfloat16),
               "packed": torch.zeros(7, dtype=torch.uint8)}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, itemsize=2, stated_itemsize=4) == 2 * 16 + 7
    assert weight_bytes(tmp_path, itemsize=4, stated_itemsize=4) == 4 * 16 + 7


def test_shards_count_once_and_only_if_listed(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(8)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    save_file({"a": torch.zeros(8), "b": torch.zeros(4)}, tmp_path / "consolidated.safetensors")
    index = {"metadata": {"total_size": 48}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(tmp_path, 4, 4) == 48
    (tmp_path / "model-2.safetensors").unlink()
    (tmp_path / "consolidated.safetensors").unlink()
    assert weight_bytes(tmp_path, 2, 4) == 24, "shards are missing: the index says it"


def test_a_float32_model_is_served_in_bfloat16_as_the_engine_does(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", torch_dtype="float32")
    assert find_shape(str(folder)).dtype == "bfloat16"
    assert find_shape(str(folder), "float32").weight_bytes == 2 * find_shape(str(folder)).weight_bytes


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8 + b"{}", b"\x02\x00\x00\x00\x00\x00\x00\x00[]", b"\x05" + b"\0" * 7]
)
def test_damaged_weights_are_told(tmp_path: Path, content: bytes) -> None:
    folder = write_config(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: not valid safetensors .*fetch the model again"):
        find_shape(str(folder))


def test_a_hub_model_is_read_from_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of the hub's own cache, as huggingface_hub writes it; offline, so nothing is downloaded."""
    commit = "0" * 40
    repo = tmp_path / "models--org--tiny"
    folder = write_config(repo / "snapshots" / commit)
    index = {"metadata": {"total_size": 777_000}, "weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shape = find_shape("org/tiny")
    assert (shape.name, shape.layers, shape.weight_bytes) == ("org/tiny", 2, 777_000)
    with pytest.raises(ModelError, match=r"org/absent: not in the hub's cache, and HF_HUB_OFFLINE .*give a directory"):
        find_shape("org/absent")


@pytest.mark.parametrize(
    ("model", "dtype", "message"),
    [
        ("no such model", "auto", "neither in the catalog"),
        ("smollm2-135m-instruct", "int8", "write auto or one of bfloat16, float16, float32"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(model: str, dtype: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        find_shape(model, dtype)
    assert "\n" not in str(caught.value)


def test_a_broken_config_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="got list, expected a JSON object"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize("key", ["num_experts", "decoder_sparse_step", "n_shared_experts"])
def test_a_number_of_a_config_that_is_none_is_told_by_its_key(tmp_path: Path, key: str) -> None:
    folder = write_config(tmp_path / "m", **{"num_experts": 4, "num_experts_per_tok": 2, key: "x"})
    with pytest.raises(ModelError, match=rf"config.json: {key}: got 'x', expected an integer >= 1"):
        find_shape(str(folder))


def test_a_size_of_the_weights_that_is_none_is_told(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m")
    index = {"metadata": {"total_size": "x"}, "weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"index\.json: total_size: got 'x', expected an integer >= 1"):
        find_shape(str(folder))


def test_what_the_hub_says_is_told_in_whole_words_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    warns = list[bool]()

    def download(*_: str) -> str:
        warns.append(logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING))
        raise OSError("unreachable " * 40)

    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("hybrid_backend.tools.plan.model.check_hub", lambda _: None)
    with pytest.raises(ModelError, match=r"\((unreachable )+\.\.\.\); give a directory"):
        find_shape("org/absent")
    assert warns == [False]


def test_the_runtimes_spec_has_the_shapes_numbers(tmp_path: Path) -> None:
    shape = find_shape(
        str(write_config(tmp_path / "m", sliding_window=64, layer_types=["sliding_attention", "full_attention"]))
    )
    spec = spec_of(shape, max_tokens=9)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (spec.window(0), spec.window(1), spec.max_tokens) == (64, None, 9)
    assert spec.page_bytes(32) == shape.page_bytes(32)


def test_what_googles_gemma_3_leaves_to_its_class_is_known(tmp_path: Path) -> None:
    """As published: `text_config` lacks what Gemma3TextConfig assumes."""
    inner = {"model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
             "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": inner}))
    shape = find_shape(str(tmp_path))
    assert (shape.head_dim, shape.vocab, shape.max_context, shape.tied) == (256, 262_208, 131_072, True)
    assert (shape.full_layers, shape.windows[0]) == (8, 1024)


_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        {"num_global_key_value_heads": 2, "global_head_dim": 512, "attention_k_eq_v": True},  # as published
        {"per_layer_config": {"5": {"head_dim": 512, "num_key_value_heads": 2}}},  # as transformers writes it
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_layers_of_gemma_4_have_the_kv_heads_of_their_kind(tmp_path: Path, keys: dict[str, Any]) -> None:
    shape = find_shape(str(write_config(tmp_path / "m", **_GEMMA4, **keys)))
    assert shape.heads_of(None) == (shape.kv_heads, shape.head_dim) == (2, 512)
    assert shape.heads_of(1024) == (8, 256)
    assert shape.page_bytes(16, 1024) == 2 * shape.page_bytes(16)
    full, windowed = 64 * 512 * (2 * 8 + 2 * 2), 64 * 256 * (2 * 8 + 2 * 8)
    assert shape.attention_params == (5 * windowed + full) // 6
    spec = spec_of(shape)
    assert spec.full_shape[:3] == spec.shape(5)[:3] == (8, 2, 512)
    assert spec.shape(0)[:3] == (8, 8, 256)


def test_the_kv_heads_of_gemma_4_without_keys_as_values_are_those_of_all_layers(tmp_path: Path) -> None:
    shape = find_shape(str(write_config(tmp_path / "m", **_GEMMA4, num_global_key_value_heads=2)))
    assert (shape.heads_of(None), shape.heads_of(1024)) == ((8, 512), (8, 256))


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, (8192, 8192, 8192, None) * 2),
        ({"no_rope_layers": [1, 0] * 4, "attention_chunk_size": 64}, (64, None) * 4),
        ({"attention_chunk_size": None}, (None,) * 8),
    ],
    ids=str,
)
def test_chunks_of_llama_4_are_told_from_full_attention(tmp_path: Path, keys: dict[str, Any], windows: Any) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    folder = write_config(
        tmp_path / "m", model_type="llama4_text", num_hidden_layers=8, intermediate_size_mlp=200, **experts, **keys
    )
    shape = find_shape(str(folder))
    assert shape.windows == windows
    assert shape.has_chunks == (None in windows and any(windows))
    assert shape.intermediate == 200
    assert shape.experts is not None
    assert (shape.experts.layers, shape.experts.intermediate, shape.experts.shared) == (4, 96, 96)


@pytest.mark.parametrize(
    ("keys", "full"),
    [
        ({"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}, 2),  # Bamba
        ({"sliding_window": 64, "layer_switch": 4}, 1),  # Cohere 2
        ({"sliding_window": 64, "sliding_window_pattern": "LLG"}, 1),  # EXAONE 4
    ],
    ids=lambda keys: next(reversed(keys)) if isinstance(keys, dict) else None,
)
def test_layers_are_told_apart_in_every_way_that_families_name_them(
    tmp_path: Path, keys: dict[str, Any], full: int
) -> None:
    folder = write_config(tmp_path / "m", num_hidden_layers=4, **keys)
    assert find_shape(str(folder)).full_layers == full


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attn_layer_period": 8}, "attn_layer_period: which layers attend"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: which layers attend, and how"),
        ({"layer_types": ["mamba", "mamba"]}, "no layer has full attention"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers: layers that share another layer's KV cache"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config: layers of one kind with different KV heads"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "mlp_only_layers: got 3, expected a list"),
    ],
    ids=lambda each: next(reversed(each)) if isinstance(each, dict) else None,
)
def test_a_model_whose_layers_cannot_be_told_is_not_planned(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_shape(str(write_config(tmp_path / "m", **keys)))


@pytest.mark.parametrize("named", [None, {"a": ["x"]}, ["x"]], ids=repr)
def test_an_index_that_names_no_files_is_told(tmp_path: Path, named: Any) -> None:
    folder = write_config(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": None, "weight_map": named}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map: expected a file name"):
        find_shape(str(folder))


def test_an_index_without_a_size_is_as_good_as_none(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m")
    counted = find_shape(str(folder)).weight_bytes
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": None, "weight_map": {"a": "b"}}))
    assert find_shape(str(folder)).weight_bytes == counted


def test_quantised_weights_that_are_not_here_are_at_most_what_is_counted(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", quantization_config={"quant_method": "awq", "bits": 4})
    assert find_shape(str(folder)).weights_are_counted
    save_file({"packed": torch.zeros(700, dtype=torch.uint8)}, folder / "model.safetensors")
    shape = find_shape(str(folder))
    assert (shape.weights_are_counted, shape.weight_bytes) == (False, 700)


@pytest.mark.parametrize("value", [1e308, 10**400, 2**31, 10_001])
def test_more_layers_than_any_model_has_are_refused_by_their_key(tmp_path: Path, value: float) -> None:
    folder = write_config(tmp_path / "m", num_hidden_layers=value)
    message = r"config.json: num_hidden_layers: got .*, expected an integer >= 1 and <= 10000"
    with pytest.raises(ModelError, match=message):
        find_shape(str(folder))


def test_json_nested_without_end_is_told_with_its_file(tmp_path: Path) -> None:
    folder, nested = write_config(tmp_path / "m"), b"[" * 100_000
    (folder / "model.safetensors").write_bytes(len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(ModelError, match=r"model\.safetensors: not valid safetensors \(nested too deeply\); fetch"):
        find_shape(str(folder))
    (folder / "config.json").write_bytes(nested)
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON \(nested too deeply\); fetch"):
        find_shape(str(folder))
