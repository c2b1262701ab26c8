"""What the profiler takes for a layer's query and keys is what the model's own attention sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_backend.errors import ModelError
from hybrid_backend.tools.profile.network import Rope, wrap
from tests.unit.profile.models import MODELS, WINDOW, build


@pytest.mark.parametrize("family", MODELS)
def test_the_query_predicted_from_a_layers_own_input_is_the_true_query(family: str) -> None:
    model = build(family)
    network = wrap(model)
    true: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        true[module.layer_idx] = (q[0].transpose(0, 1), k[0].transpose(0, 1))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **more)

    AttentionInterface.register("watched_by_tests", attention)
    network.decoder.config._attn_implementation = "watched_by_tests"
    ours: dict[int, tuple[Tensor, Tensor]] = {}

    def seen(index: int, x: Tensor, rope: Rope) -> None:
        ours[index] = network.layers[index].queries_and_keys(x, rope)

    ids = torch.randint(1, 128, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), network.watched(seen):
        network.decoder(ids, use_cache=False)
    assert sorted(ours) == sorted(true) == list(range(len(network.layers)))
    for index, (q, k) in ours.items():
        assert (q - true[index][0]).abs().max() < 1e-4
        assert (k - true[index][1]).abs().max() < 1e-4


def test_a_watched_model_is_left_without_hooks() -> None:
    network = wrap(build("llama"))
    with network.watched(lambda *_: None):
        assert all(layer.module._forward_pre_hooks for layer in network.layers)
    assert not any(layer.module._forward_pre_hooks for layer in network.layers)


def test_sliding_layers_are_told_from_full_ones() -> None:
    network = wrap(build("gemma3"))
    assert [layer.window for layer in network.layers] == [WINDOW, WINDOW, None] * 2
    assert [layer.index for layer in network.full_layers] == [2, 5]
    assert all(layer.window is None for layer in wrap(build("qwen2")).layers)


def test_a_model_without_full_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="sliding window"):
        wrap(build("mistral", sliding_window=WINDOW))


def test_a_model_with_layers_of_another_kind_is_refused_by_name() -> None:
    config = transformers.Lfm2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    with pytest.raises(ModelError, match="'lfm2' cannot be profiled: layer 0, Lfm2DecoderLayer, is not one of"):
        wrap(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("class_name", "keys", "message"),
    [
        ("Gemma4TextConfig", {"sliding_window": WINDOW, "hidden_size_per_layer_input": 0, "global_head_dim": 32,
          "layer_types": ["sliding_attention", "full_attention"]}, "heads of 16 and 32 channels; serve it with"),
        ("Llama4TextConfig", {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0], "intermediate_size_mlp": 80,
          "num_local_experts": 2, "pad_token_id": 0}, "layers that attend chunks of the sequence .*; serve it with"),
    ],
    ids=["gemma4", "llama4"],
)  # fmt: skip
def test_layers_of_unlike_shape_and_in_chunks_are_refused_by_name(
    class_name: str, keys: dict[str, Any], message: str
) -> None:
    config = getattr(transformers, class_name)(
        vocab_size=128, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, **keys,
    )  # fmt: skip
    with pytest.raises(ModelError, match=f"cannot be profiled: .*{message} the default configuration"):
        wrap(transformers.AutoModelForCausalLM.from_config(config))
