"""A model's shape from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_backend.errors import ModelError
from hybrid_backend.model import shape_from_config
from tests.support.model_cards import CARDS

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "max_position_embeddings": 131072,
}  # fmt: skip


def test_the_demo_models_weights_are_counted_to_a_percent(model_dir: Path) -> None:
    counted = shape_from_config(json.loads((model_dir / "config.json").read_text()), "demo")
    on_disk = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    assert counted.weight_bytes == pytest.approx(on_disk, rel=0.01)


def test_llama_8b_has_8_billion_weights_and_128_kib_of_kv_per_token() -> None:
    """8.03e9 parameters (model card); 2 x 32 layers x 8 heads x 128 x 2 bytes per token."""
    shape = shape_from_config(LLAMA_8B, "llama")
    assert shape.weight_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
    assert shape.token_bytes * shape.layers == 128 * 1024
    assert shape.page_bytes(32) == 32 * 4096
    assert shape.windows == (None,) * 32
    assert shape.max_context == 131072


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"sliding_window": 4096}, (4096,) * 4),
        ({"sliding_window": None}, (None,) * 4),
        ({"sliding_window": 4096, "use_sliding_window": False}, (None,) * 4),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2}, (512, None) * 2),
        ({"sliding_window": 512, "sliding_window_pattern": 2}, (512, None) * 2),
    ],
)
def test_windows_are_read_as_each_family_writes_them(keys: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert shape_from_config({**LLAMA_8B, "num_hidden_layers": 4, **keys}, "m").windows == windows


def test_gemma_3_keeps_its_decoder_one_level_down_and_every_sixth_layer_global() -> None:
    inner = {**LLAMA_8B, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 1024}
    del inner["tie_word_embeddings"]
    shape = shape_from_config({"model_type": "gemma3", "text_config": inner, "torch_dtype": "bfloat16"}, "gemma")
    assert [i for i, window in enumerate(shape.windows) if window is None] == [5, 11]
    assert shape.full_layers == 2
    assert shape.tied


@pytest.mark.parametrize("name", CARDS)
def test_published_models_are_counted_to_three_percent_and_keep_kv_in_full_layers_only(name: str) -> None:
    card = CARDS[name]
    shape = shape_from_config(card.config, name)
    assert shape.weight_bytes / 2e9 == pytest.approx(card.billions, rel=0.03)
    assert shape.full_layers == card.full_layers
    assert shape.full_layers * shape.token_bytes == card.kv_kib * 1024
    assert (shape.state_bytes > 0) == (0 in shape.windows)


def test_a_mixtures_step_reads_the_experts_that_its_rows_meet() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts per token; 3.3e9 parameters per token (model card)."""
    shape = shape_from_config(CARDS["Qwen/Qwen3-30B-A3B"].config, "m")
    one = shape.layers * shape.layer_params + 2 * shape.vocab * shape.hidden
    assert one == pytest.approx(3.3e9, rel=0.03)
    every = 3 * shape.hidden * 128 * 768
    assert shape.mlp_params(1) == pytest.approx(every / 16)
    assert shape.mlp_params(8) == pytest.approx(every * (1 - (1 - 1 / 16) ** 8))
    assert shape.mlp_params(1000) == pytest.approx(every, rel=1e-6)


def test_heads_may_have_a_dimension_of_their_own() -> None:
    assert shape_from_config({**LLAMA_8B, "head_dim": 64}, "m").head_dim == 64
    assert shape_from_config(LLAMA_8B, "m").head_dim == 128


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: got null"),
        ({"hidden_size": 0}, "hidden_size: got 0"),
        ({"vocab_size": "many"}, "vocab_size: got 'many'"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"num_experts": 128, "num_experts_per_tok": 0}, "num_experts_per_tok: got 0, expected 1 to 128"),
        ({"layer_types": ["chunked_attention"] * 32}, "layers of kind 'chunked_attention'"),
        ({"torch_dtype": "int4"}, "dtype 'int4'"),
        ({"num_key_value_heads": 5}, "cannot share 5"),
    ],
)
def test_what_cannot_be_planned_is_told(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as error:
        shape_from_config({**LLAMA_8B, **keys}, "my-model")
    assert words in str(error.value)
    assert str(error.value).startswith("my-model")
