"""Tiny random models of every family that can be profiled."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from tests.support.models import peaked

WINDOW = 24
VOCABULARY = 128
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # heads * head_dim is not the hidden size
    "max_position_embeddings": 1024,
}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
_GEMMA = {"num_hidden_layers": 6, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "layer_types": _SLIDING * 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"hidden_size": 64}),
    "qwen3": ("Qwen3Config", {}),
    "glm4": ("Glm4Config", {"attention_bias": True, "pad_token_id": 0}),
    "phi3": ("Phi3Config", {"hidden_size": 64, "pad_token_id": 0}),  # one projection for queries, keys and values
    "gemma3": ("Gemma3TextConfig", _GEMMA),
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    class_name, arguments = MODELS[name]
    return peaked(class_name, **{**_SHAPE, **arguments, **changes}).eval().requires_grad_(False)


def encode(text: str) -> list[int]:
    """A tokenizer of one token per byte."""
    return [byte % VOCABULARY for byte in text.encode()]
