"""What a ``config.json`` says of its layers: which attend, which have experts, what others keep and weigh.

Keys are those of Hugging Face's configuration classes; families name the same thing in several ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybrid_backend.config.rules import MOST, show
from hybrid_backend.errors import ModelError

Data = Mapping[str, Any]
Kind = Literal["full", "local", "other"]

_KINDS: Mapping[str, Kind] = {
    "full_attention": "full", "attention": "full", "sliding_attention": "local",
    "linear_attention": "other", "mamba": "other", "mamba2": "other", "conv": "other",
    "*": "full", "M": "other", "-": "other", "E": "other",  # Nemotron-H: attention, Mamba 2, an MLP, experts
}  # fmt: skip
_STATE_BYTES = 4
"""Of one element of a state, at most: vLLM keeps some in the model's type, some in fp32."""


@dataclass(frozen=True)
class Experts:
    """Routed experts of a mixture. ``intermediate``: of one of them; ``shared``: of the one that every token passes, 0:
    there is none; ``layers``: layers that have experts, the others have a dense MLP."""

    count: int
    per_token: int
    intermediate: int
    shared: int
    layers: int

    def met(self, rows: int) -> float:
        """Experts that ``rows`` tokens meet, on average, if they choose evenly and apart from each other."""
        return self.count * (1.0 - (1.0 - self.per_token / self.count) ** rows)


def count_of(data: Data, key: str, default: int | None = None, most: int = MOST) -> int:
    """Return the number under ``key``, from 1 to ``most``; it must be there, unless there is a default."""
    value = data.get(key)
    value = default if value is None else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"{key}: got {show(value)}, expected an integer >= 1 and <= {most}")
    return value


def windows_of(data: Data, layers: int) -> tuple[int | None, ...]:
    """Per layer the sliding window in tokens, None for full attention, 0 for a layer of another kind."""
    window: Any = data.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or data.get("use_sliding_window") is False:
        window = None
    named = _named(data, layers)
    unknown = sorted(set(named) - _KINDS.keys())
    if unknown:
        raise ModelError(f"layers of kind {unknown[0]!r} cannot be planned")
    if named:
        return tuple({"local": window, "full": None, "other": 0}[_KINDS[kind]] for kind in named)
    if window is None:
        return (None,) * layers
    pattern = data.get("sliding_window_pattern") or data.get("layer_switch")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:  # local and global, over and over
        return tuple(window if pattern[layer % len(pattern)] == "L" else None for layer in range(layers))
    if pattern is None and str(data.get("model_type")).startswith("gemma3"):
        pattern = 6
    if isinstance(pattern, int) and pattern > 0:  # every pattern-th layer is global
        return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))
    first = _first(data, "max_window_layers") if data.get("use_sliding_window") else 0  # Qwen2: full up to this layer
    return tuple(window if layer >= first else None for layer in range(layers))


def experts_of(data: Data, layers: int) -> Experts | None:
    """None: a dense model."""
    count = _first(data, "num_experts", "num_local_experts", "n_routed_experts")
    if not count:
        return None
    intermediate = _first(data, "moe_intermediate_size") or count_of(data, "intermediate_size")
    shared = _first(
        data, "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"
    )
    if not shared:
        shared = intermediate * _first(data, "n_shared_experts")
    named, step = _named(data, layers), _first(data, "decoder_sparse_step") or 1
    only = data.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise ModelError(f"mlp_only_layers: got {show(only)}, expected a list of layers")
    dense = {*range(min(layers, _first(data, "first_k_dense_replace"))), *only}
    if "E" in named:
        having = named.count("E")
    else:
        having = sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
    per_token = _first(data, "num_experts_per_tok", "top_k_experts")
    if not 0 < per_token <= count:
        raise ModelError(f"num_experts_per_tok: got {per_token}, expected 1 to {count}")
    return Experts(count, per_token, intermediate, shared, having)


def mixer_params(data: Data) -> int:
    """Of the matrices of a layer of another kind, without its MLP: gated delta net (Qwen3-Next, Qwen3.5), Mamba 2, or
    LFM2's short convolution."""
    hidden = count_of(data, "hidden_size")
    if data.get("linear_num_value_heads"):
        key, value = _delta_widths(data)
        return hidden * (2 * key + 2 * value + 2 * count_of(data, "linear_num_value_heads")) + value * hidden
    if _mamba_heads(data):
        inner, both = _mamba_widths(data)
        return hidden * (2 * inner + both + _mamba_heads(data)) + inner * hidden
    return 4 * hidden * hidden


def state_bytes(data: Data, layers: int) -> int:
    """What one sequence keeps in that many layers of other kinds, at most."""
    hidden = count_of(data, "hidden_size")
    if data.get("linear_num_value_heads"):
        key, value = _delta_widths(data)
        kernel = _first(data, "linear_conv_kernel_dim") or 4
        values = (kernel - 1) * (2 * key + value) + value * count_of(data, "linear_key_head_dim")
    elif _mamba_heads(data):
        inner, both = _mamba_widths(data)
        kernel = _first(data, "conv_kernel", "mamba_d_conv") or 4
        values = (kernel - 1) * (inner + both) + inner * _first(data, "ssm_state_size", "mamba_d_state")
    else:
        values = (_first(data, "conv_L_cache") or 3) * hidden
    return layers * values * _STATE_BYTES


def mlp_matrices(data: Data) -> int:
    """Matrices of one MLP: gate, up and down; Nemotron's squared ReLU has no gate."""
    return 2 if str(data.get("mlp_hidden_act")) == "relu2" else 3


def stands_alone(data: Data, layers: int) -> bool:
    """Whether each layer is a mixer or an MLP, not one after the other (Nemotron-H)."""
    return "*" in _named(data, layers)


def dense_mlps(data: Data, layers: int, experts: Experts | None) -> int:
    """Layers with a dense MLP."""
    if stands_alone(data, layers):
        return _named(data, layers).count("-")
    return layers - (experts.layers if experts else 0)


def _named(data: Data, layers: int) -> list[str]:
    """The kind of each layer as the file names it; empty: it does not."""
    for key in ("layer_types", "layers_block_type"):
        kinds = data.get(key)
        if isinstance(kinds, list) and len(kinds) == layers:
            return [str(kind) for kind in kinds]
    pattern = data.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) == layers:
        return list(pattern)
    interval = data.get("full_attention_interval")
    if isinstance(interval, int) and interval > 1 and data.get("linear_num_value_heads"):
        return ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]
    for key, other in (("full_attn_idxs", "conv"), ("attn_layer_indices", "mamba")):
        attending = data.get(key)
        if isinstance(attending, list):
            return ["full_attention" if layer in attending else other for layer in range(layers)]
    for key in ("attn_layer_period", "attn_type_list", "attention_chunk_size"):
        if data.get(key):
            raise ModelError(f"{key}: which layers attend, and how, is not read from it; such models are not planned")
    return []


def _first(data: Data, *keys: str) -> int:
    return next((count_of(data, key) for key in keys if data.get(key)), 0)


def _delta_widths(data: Data) -> tuple[int, int]:
    """Of all keys and of all values of a gated delta net."""
    key = count_of(data, "linear_num_key_heads") * count_of(data, "linear_key_head_dim")
    return key, count_of(data, "linear_num_value_heads") * count_of(data, "linear_value_head_dim")


def _mamba_heads(data: Data) -> int:
    return _first(data, "mamba_num_heads", "mamba_n_heads")


def _mamba_widths(data: Data) -> tuple[int, int]:
    """Of what Mamba 2 carries, and of B and C together."""
    inner = _mamba_heads(data) * _first(data, "mamba_head_dim", "mamba_d_head")
    return inner, 2 * _first(data, "n_groups", "mamba_n_groups") * _first(data, "ssm_state_size", "mamba_d_state")
