"""Kinds and shapes of a model's attention layers, from vLLM's configuration before the model is built.

A *local* layer attends a sliding window, or its own chunk of the sequence (Llama 4). Local layers may have another
shape than the layers with full attention (Gemma 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AttentionShape(NamedTuple):
    """Query heads and KV heads of one rank, and head_dim, of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads} query heads on {self.kv_heads} KV heads of {self.head_dim}"


def has_local_layers(model: Any) -> bool:
    """Tell whether the model's files name a sliding window or chunks. ``model`` is vLLM's ``ModelConfig``."""
    return model.get_sliding_window() is not None or bool(model.attention_chunk_size)


def local_layers(model: Any) -> list[bool]:
    """Tell of each layer whether it is local; empty if the model's files name no kinds of layers.

    ``model`` is vLLM's ``ModelConfig``.
    """
    local_kinds = set()
    if model.get_sliding_window() is not None:
        local_kinds.add("sliding_attention")
    if model.attention_chunk_size:
        local_kinds.add("chunked_attention")
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    return [kind in local_kinds for kind in kinds] if local_kinds else []


def attention_shapes(vllm_config: VllmConfig, local: bool) -> list[AttentionShape]:
    """Return the different shapes of all local layers, or of all layers with full attention, in the model's order.

    If the model's files name no kinds of layers, all layers count as layers with full attention.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    # None, or not there in older versions of vLLM, if all layers have the shape of the model.
    overrides = getattr(model.model_arch_config, "per_layer_overrides", None)
    if overrides is None:
        heads, kv_heads = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
        return [AttentionShape(heads, kv_heads, model.get_head_size())]
    kinds = local_layers(model) or [False] * len(overrides)
    layers = [model.model_arch_config[index] for index, is_local in enumerate(kinds) if is_local == local]
    shapes = [
        AttentionShape(
            model.get_num_attention_heads(parallel, layer), model.get_num_kv_heads(parallel, layer), layer.head_size
        )
        for layer in layers
    ]
    return list(dict.fromkeys(shapes))


def full_shape(vllm_config: VllmConfig) -> AttentionShape:
    """Return the shape of the layers with full attention, which select pages and are offloaded.

    A model without layers with full attention, which is refused later, has the shape of its local layers.
    """
    return (attention_shapes(vllm_config, local=False) or attention_shapes(vllm_config, local=True))[0]
