"""The predicted query (DESIGN.md section 4): rope(qnorm(Wq[l+1] . norm[l+1](x[l]))), from the model's own modules.

A pre-hook on decoder layer l calls an opaque custom op with the layer's input. The op survives torch.compile because
it claims to mutate a token tensor; what it does with the input is invisible to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import EngineError

# Families whose decoder layers are called as layer(positions, hidden_states, residual), normalise their input with
# `input_layernorm` and project it with `self_attn.qkv_proj`. The value says whether queries are normalised per head.
_FAMILIES: Mapping[str, bool] = MappingProxyType(
    {"llama": False, "mistral": False, "qwen2": False, "qwen3": True, "gemma3": True, "glm": False}
)
_MODEL_TYPES: Mapping[str, str] = MappingProxyType({"gemma3_text": "gemma3"})
_LIBRARY = torch.library.Library("hybrid_backend", "FRAGMENT")


def family_of(hf_config: Any, config: HybridConfig) -> str | None:
    """The model's lookahead family: the one that the configuration names, else by model type; None if unknown."""
    if config.model.family != "auto":
        return config.model.family
    model_type = _MODEL_TYPES.get(hf_config.model_type, hf_config.model_type)
    return model_type if model_type in _FAMILIES else None


class QueryPredictor:
    """Predicts one layer's query from the input of an earlier decoder layer."""

    def __init__(self, layer: nn.Module, family: str) -> None:
        attention = getattr(layer, "self_attn", None)
        needed = ["qkv_proj", "rotary_emb", "q_size", "kv_size", "head_dim"] + ["q_norm"] * _FAMILIES[family]
        absent = [name for name in needed if not hasattr(attention, name)]
        surplus = [] if _FAMILIES[family] else [name for name in ("q_norm",) if hasattr(attention, name)]
        if attention is None or not hasattr(layer, "input_layernorm") or absent or surplus:
            raise EngineError(
                f"model.family: {type(layer).__name__} does not look like family {family!r} "
                f"({'lacks ' + ', '.join(absent) if absent else 'its attention has ' + ', '.join(surplus)}); "
                "name the right family or set lookahead: {enabled: false}"
            )
        self._norm = layer.input_layernorm
        self._attention = attention

    def __call__(self, positions: Tensor, x: Tensor) -> Tensor:
        """``positions``: ``[rows]``; ``x``: ``[rows, hidden]``, the residual stream. Returns ``[rows, heads, head_dim]``."""
        attention = self._attention
        qkv, _ = attention.qkv_proj(self._norm(x))
        q, k, _ = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        q = q.reshape(len(x), -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            q = attention.q_norm(q)
        q, _ = attention.rotary_emb(positions, q.reshape(len(x), -1), k.contiguous())
        return q.view(len(x), -1, attention.head_dim)


def _lookahead(
    positions: Tensor, hidden_states: Tensor, residual: Tensor | None, token: Tensor, layer_name: str
) -> None:
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):
        return  # profiling: no step
    metadata = context.attn_metadata.get(layer_name)
    if metadata is not None:
        context.no_compile_layers[layer_name].impl.lookahead(metadata, positions, hidden_states, residual)


def _lookahead_fake(
    positions: Tensor, hidden_states: Tensor, residual: Tensor | None, token: Tensor, layer_name: str
) -> None:
    return None


direct_register_custom_op(
    "lookahead", _lookahead, mutates_args=["token"], fake_impl=_lookahead_fake, target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)


def hook_for(layer_name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """A pre-hook for a decoder layer, which announces its input to the attention layer ``layer_name``."""
    token = torch.zeros(1)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("positions", "hidden_states", "residual")
        values = list(args[:3]) + [kwargs.get(name) for name in names[len(args) :]]
        positions, hidden_states, residual = values
        torch.ops.hybrid_backend.lookahead(positions, hidden_states, residual, token, layer_name)

    return hook
