"""Attention layers of a vLLM model, and the hooks that are attached to its decoder layers before compilation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear

from hybrid_backend.attention.fused_lookahead import fused
from hybrid_backend.attention.lookahead import Layer, call_names, layer_at, predictors
from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import OWN_BACKEND
from hybrid_backend.engines.vllm.hooks import LAYER_INPUT, input_hook, lookahead_hook
from hybrid_backend.engines.vllm.layer import HybridImpl
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

    They are our layers, and sliding-window layers, which are the engine's own on a GPU (`device_groups`).
    """
    modules = dict(model.named_modules())
    return [
        layer_at(modules, path)
        for path, module in modules.items()
        if isinstance(module, Attention) and (isinstance(module.impl, HybridImpl) or module.sliding_window is not None)
    ]


def full_attention(layers: Sequence[Layer]) -> set[str]:
    """Return the names of the layers without a sliding window."""
    return {layer.attention.layer_name for layer in layers if layer.attention.sliding_window is None}


def attach_lookahead(model: nn.Module, vllm_config: VllmConfig, config: HybridConfig, device: torch.device) -> None:
    """Predict the query of every full-attention layer at the input of the decoder layer before it.

    Layers for which that is impossible select with their true queries. Must be called before compilation.
    """
    if not looks_ahead(resolve_method(config.method), config):
        return
    engine = vllm_config.model_config
    stream = torch.empty(0, engine.get_hidden_size(), dtype=engine.dtype, device=device)
    attending = attention_layers(model)
    config = config.for_layers([layer.attention.sliding_window for layer in attending])
    layers = {
        index: layer
        for index, layer in enumerate(attending)
        if layer.before is not None and layer.attention.sliding_window is None and config.is_predicted(index)
    }
    predictor_of_layer, warning = predictors(layers, engine.get_head_size(), stream, (QKVParallelLinear,), layer_inputs)
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
    compilation = vllm_config.compilation_config
    if compilation.splitting_ops_contain_attention():
        compilation.splitting_ops.append(LAYER_INPUT)
    for attention, decoder, _ in layers:
        decoder.register_forward_pre_hook(input_hook(decoder, attention.layer_name), with_kwargs=True)


def check_groups(model: nn.Module, kv_cache_config: KVCacheConfig) -> None:
    """Check, before memory is allocated, that one block table per request names the runtime's pages.

    Raises:
        EngineError: vLLM has put the layers with full attention into several groups with pages of their own.
    """
    names = full_attention(attention_layers(model))
    groups = sum(not names.isdisjoint(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    if groups > 1:
        raise EngineError(
            f"vLLM splits the {len(names)} full-attention layers into {groups} KV cache groups, since layers of other "
            f"kinds are fewer; not supported: {OWN_BACKEND}, or, where the others have sliding "
            "windows, add --disable-hybrid-kv-cache-manager"
        )
