"""The predicted query (DESIGN.md section 4): rope(qnorm(Wq[l+1] . norm[l+1](x[l]))), from the model's own modules.

Works on the decoder layers of any engine that keeps Hugging Face's module names; an adapter only supplies the layer,
its input and the positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from hybrid_backend.errors import EngineError

# Families whose decoder layers are called as layer(positions, hidden_states, residual), normalise their input with
# `input_layernorm` and project it with `self_attn.qkv_proj`. The value says whether queries are normalised per head.
_FAMILIES: Mapping[str, bool] = MappingProxyType(
    {"llama": False, "mistral": False, "qwen2": False, "qwen3": True, "gemma3": True, "glm4": False}
)
_MODEL_TYPES: Mapping[str, str] = MappingProxyType({"gemma3_text": "gemma3"})


def family_of(model_type: str, configured: str) -> str | None:
    """The model's lookahead family: ``model.family`` of the configuration, or by model type; None if unknown."""
    family = configured if configured != "auto" else _MODEL_TYPES.get(model_type, model_type)
    return family if family in _FAMILIES else None


class QueryPredictor:
    """Predicts one layer's query from the input of an earlier decoder layer."""

    def __init__(self, layer: nn.Module, family: str) -> None:
        attention = getattr(layer, "self_attn", None)
        needed = ["qkv_proj", "rotary_emb", "q_size", "kv_size", "head_dim"] + ["q_norm"] * _FAMILIES[family]
        absent = [name for name in needed if not hasattr(attention, name)]
        surplus = [] if _FAMILIES[family] else [name for name in ("q_norm",) if hasattr(attention, name)]
        if getattr(attention, "do_llama_4_scaling", False):  # Mistral's long-context scaling of the rotated query
            surplus.append("llama_4_scaling")
        if attention is None or not hasattr(layer, "input_layernorm") or absent or surplus:
            raise EngineError(
                f"model.family: {type(layer).__name__} does not look like family {family!r} "
                f"({'lacks ' + ', '.join(absent) if absent else 'its attention has ' + ', '.join(surplus)}); "
                "name the right family or set lookahead: {enabled: false}"
            )
        self._norm: Any = layer.input_layernorm
        self._attention: Any = attention

    def __call__(self, positions: Tensor, x: Tensor) -> Tensor:
        """``positions``: ``[rows]``; ``x``: ``[rows, hidden]``, the residual stream. ``[rows, heads, head_dim]``."""
        attention = self._attention
        qkv, _ = attention.qkv_proj(self._norm(x))
        q, k, _ = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        q = q.reshape(len(x), -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            q = attention.q_norm(q)
        q, _ = attention.rotary_emb(positions, q.reshape(len(x), -1), k.contiguous())
        predicted: Tensor = q.view(len(x), -1, attention.head_dim)
        return predicted
