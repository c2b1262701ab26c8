"""Attention layers of a vLLM model, and the hooks that are attached to its decoder layers before compilation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.kv_cache_interface import AttentionSpec

from hybrid_backend.attention.fused_lookahead import fused
from hybrid_backend.attention.lookahead import Layer, call_names, layer_at, predictors
from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import OWN_BACKEND
from hybrid_backend.engines.vllm.hooks import LAYER_INPUT, LOOKAHEAD, input_hook, lookahead_hook
from hybrid_backend.engines.vllm.layer import HybridImpl
from hybrid_backend.engines.vllm.layer_kinds import full_shape
from hybrid_backend.engines.vllm.parking import forgo_parking
from hybrid_backend.errors import EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.step.method import looks_ahead
from hybrid_backend.step.operations import are_launches

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def attention_layers(model: nn.Module) -> list[Layer]:
    """Return all layers that keep keys and values, in the order in which the runtime counts them.

    They are our layers, and local layers, which are the engine's own on a GPU (`device_groups`).
    """
    modules = dict(model.named_modules())
    return [
        layer_at(modules, path)
        for path, module in modules.items()
        if isinstance(module, Attention) and (isinstance(module.impl, HybridImpl) or window_of(module) is not None)
    ]


def window_of(attention: Any) -> int | None:
    """Return the tokens of a local layer's sliding window or chunk; None for a layer with full attention."""
    return chunk_of(attention) or attention.sliding_window


def chunk_of(attention: Any) -> int | None:
    """Return the tokens of a chunk of the sequence, if the layer attends no other chunk's tokens (Llama 4)."""
    return getattr(attention, "attention_chunk_size", None)


def full_attention(layers: Sequence[Layer]) -> set[str]:
    """Return the names of the layers with full attention."""
    return {layer.attention.layer_name for layer in layers if window_of(layer.attention) is None}


def attach_lookahead(model: nn.Module, vllm_config: VllmConfig, config: HybridConfig, device: torch.device) -> None:
    """Predict the query of every full-attention layer at the input of the decoder layer before it.

    Layers for which that is impossible select with their true queries. Must be called before compilation.
    """
    if not looks_ahead(resolve_method(config.method), config):
        return
    engine = vllm_config.model_config
    stream = torch.empty(0, engine.get_hidden_size(), dtype=engine.dtype, device=device)
    attending = attention_layers(model)
    config = config.for_layers([window_of(layer.attention) for layer in attending])
    layers = {
        index: layer
        for index, layer in enumerate(attending)
        if layer.before is not None and window_of(layer.attention) is None and config.is_predicted(index)
    }
    head_dim = full_shape(vllm_config).head_dim
    predictor_of_layer, warning = predictors(layers, head_dim, stream, (QKVParallelLinear,), layer_inputs)
    if predictor_of_layer:
        cut_before(LOOKAHEAD, vllm_config)
    for index, predictor in predictor_of_layer.items():
        attention, decoder, before = layers[index]
        assert before is not None
        attention.impl.predictor = predictor
        if are_launches(config, device):
            attention.impl.predictor = fused(
                predictor, decoder, stream, (QKVParallelLinear,), layer_inputs, engine.max_model_len
            )
        before.register_forward_pre_hook(lookahead_hook(before, attention.layer_name, device), with_kwargs=True)
    if warning:
        init_logger("vllm.hybrid_backend").warning(warning)


def layer_inputs(positions: Tensor, hidden: Tensor, residual: Tensor | None) -> dict[str, Tensor | None]:
    """Return the arguments of a decoder layer by the names that vLLM's models use."""
    return {"positions": positions, "hidden_states": hidden, "residual": residual}


def attach_inputs(model: nn.Module, vllm_config: VllmConfig, config: HybridConfig) -> None:
    """Give the runtime every decoder layer's input, so that rows may continue from an earlier step.

    Must be called before compilation.
    """
    layers = attention_layers(model)
    unknown = next((layer.decoder for layer in layers if "hidden_states" not in call_names(layer.decoder)), None)
    if unknown is not None:
        forgo_parking(vllm_config, config, f"{type(unknown).__name__}, which is not called with hidden_states")
        return
    cut_before(LAYER_INPUT, vllm_config)
    for attention, decoder, _ in layers:
        decoder.register_forward_pre_hook(input_hook(decoder, attention.layer_name), with_kwargs=True)


def cut_before(op: str, vllm_config: VllmConfig) -> None:
    """End the pieces of a compiled model before ``op``, where the model is cut into pieces at all."""
    compilation = vllm_config.compilation_config
    if compilation.splitting_ops_contain_attention():
        compilation.splitting_ops.append(op)


def block_size_of(model: nn.Module, kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens in a block of the layers with full attention, before memory is allocated.

    Raises:
        EngineError: vLLM has put these layers into several groups, so that a request has several block tables.
    """
    names = full_attention(attention_layers(model))
    groups = [group for group in kv_cache_config.kv_cache_groups if not names.isdisjoint(group.layer_names)]
    if len(groups) > 1:
        raise EngineError(
            f"vLLM splits the {len(names)} full-attention layers into {len(groups)} KV cache groups, since layers of "
            f"other kinds are fewer; not supported: {OWN_BACKEND}, or, where the others have sliding "
            "windows or chunks, add --disable-hybrid-kv-cache-manager"
        )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if any(isinstance(spec, AttentionSpec) and spec.page_size_padded is not None for spec in specs):
        raise EngineError(
            "vLLM pads the KV blocks of this model's layers, whose bytes per token are no multiples of one another; "
            f"not supported: {OWN_BACKEND}, or add --disable-hybrid-kv-cache-manager"
        )
    return groups[0].kv_cache_spec.block_size if groups else 0
