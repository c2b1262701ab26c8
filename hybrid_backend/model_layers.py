"""The layers that a ``config.json`` describes: attention kinds, experts, recurrent states and weights.

The keys are those of Hugging Face's configuration classes. Model families use different keys for the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hybrid_backend.config.rules import MOST, show
from hybrid_backend.errors import ModelError

Data = Mapping[str, Any]
Kind = Literal["full", "local", "other"]

_KINDS: Mapping[str, Kind] = {
    "full_attention": "full", "attention": "full", "sliding_attention": "local",
    "linear_attention": "other", "mamba": "other", "mamba2": "other", "conv": "other",
    "*": "full", "M": "other", "-": "other", "E": "other",  # Nemotron-H: attention, Mamba 2, MLP, experts
}  # fmt: skip
_GEMMA3 = {
    "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096,
}  # fmt: skip
_GEMMA4 = {"tie_word_embeddings": True, "head_dim": 256, "vocab_size": 262_144, "global_head_dim": 512}
_LLAMA4 = {"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4, "interleave_moe_layer_step": 1}
ASSUMED: Mapping[str, Data] = {
    "gemma3": _GEMMA3, "gemma3_text": _GEMMA3, "gemma4": _GEMMA4, "gemma4_text": _GEMMA4,
    "gemma4_unified": _GEMMA4, "gemma4_unified_text": _GEMMA4, "llama4": _LLAMA4, "llama4_text": _LLAMA4,
}  # fmt: skip
"""Defaults of transformers' configuration classes, by model type, for keys that a model's config.json omits."""
_STATE_BYTES = 4
"""Most bytes per element of a recurrent state. vLLM stores some states in the model's dtype and some in fp32."""


@dataclass(frozen=True)
class Experts:
    """Mixture of experts.

    Attributes:
        count: routed experts of a layer.
        per_token: routed experts that the router selects for a token.
        intermediate: intermediate size of one routed expert.
        shared: intermediate size of the shared expert, which every token passes. 0: no shared expert.
        layers: number of layers with experts; the MLP of every other layer is dense.
    """

    count: int
    per_token: int
    intermediate: int
    shared: int
    layers: int

    def met(self, rows: int) -> float:
        """Return the mean number of routed experts that ``rows`` tokens use if the router selects uniformly."""
        return self.count * (1.0 - (1.0 - self.per_token / self.count) ** rows)


def count_of(data: Data, key: str, default: int | None = None, most: int = MOST) -> int:
    """Return the integer under ``key`` of a config.json, or ``default`` if the key is absent.

    Raises:
        ModelError: the value is not an integer from 1 to ``most``, or both the key and a default are missing.
    """
    value = data.get(key)
    value = default if value is None else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"{key}: got {show(value)}, expected an integer >= 1 and <= {most}")
    return value


def windows_of(data: Data, layers: int) -> tuple[int | None, ...]:
    """Return per layer the tokens of its window or chunk, None for full attention, 0 for a layer without attention."""
    if has_chunks(data):
        return _chunks_of(data, layers)
    window: Any = data.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or data.get("use_sliding_window") is False:
        window = None
    kinds = _layer_kinds(data, layers)
    unknown = sorted(set(kinds) - _KINDS.keys())
    if unknown:
        raise ModelError(f"layers of kind {unknown[0]!r} cannot be planned")
    if kinds:
        return tuple({"local": window, "full": None, "other": 0}[_KINDS[kind]] for kind in kinds)
    if window is None:
        return (None,) * layers
    pattern = data.get("sliding_window_pattern") or data.get("layer_switch")
    if (
        isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}
    ):  # The pattern of local and global layers repeats.
        return tuple(window if pattern[layer % len(pattern)] == "L" else None for layer in range(layers))
    if pattern is None and str(data.get("model_type")).startswith("gemma3"):
        pattern = 6
    if isinstance(pattern, int) and pattern > 0:  # Every pattern-th layer has full attention.
        return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))
    # Qwen2: the layers before ``max_window_layers`` have full attention.
    first = _first(data, "max_window_layers") if data.get("use_sliding_window") else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def has_chunks(data: Data) -> bool:
    """Tell whether layers attend their own chunk of the sequence (Llama 4), and not a sliding window."""
    return _is_llama4(data) and bool(data.get("attention_chunk_size"))


def _chunks_of(data: Data, layers: int) -> tuple[int | None, ...]:
    """Return per layer of Llama 4 the tokens of a chunk; None for a layer with full attention, which has no rope."""
    chunk, ropes = count_of(data, "attention_chunk_size"), data.get("no_rope_layers")
    if isinstance(ropes, list) and len(ropes) == layers:
        return tuple(chunk if rope else None for rope in ropes)
    interval = count_of(data, "no_rope_layer_interval")
    return tuple(None if (layer + 1) % interval == 0 else chunk for layer in range(layers))


def _is_llama4(data: Data) -> bool:
    return str(data.get("model_type")).startswith("llama4")


class KvHeads(NamedTuple):
    """Number and size of the KV heads of one kind of layers."""

    heads: int
    head_dim: int


def kv_heads_of(data: Data, windows: Sequence[int | None], heads: int) -> tuple[KvHeads, KvHeads]:
    """Return the KV heads of the layers with full attention, and those of the layers with windows.

    Raises:
        ModelError: layers of one kind have different KV heads, or take those of another layer.
    """
    if _first(data, "num_kv_shared_layers"):
        raise ModelError("num_kv_shared_layers: layers that share another layer's KV cache cannot be planned")
    head_dim = count_of(data, "head_dim", count_of(data, "hidden_size") // heads)
    common = KvHeads(count_of(data, "num_key_value_heads", heads), head_dim)
    of_kind: dict[bool, set[KvHeads]] = {True: set(), False: set()}
    for layer, window in enumerate(windows):
        if window != 0:
            of_kind[window is None].add(_layer_kv_heads(data, layer, window is None, common))
    unlike = next((kinds for kinds in of_kind.values() if len(kinds) > 1), None)
    if unlike is not None:
        raise ModelError(f"per_layer_config: layers of one kind with different KV heads, {sorted(unlike)}")
    full = next(iter(of_kind[True]), common)
    return full, next(iter(of_kind[False]), full)


def _layer_kv_heads(data: Data, layer: int, is_full: bool, common: KvHeads) -> KvHeads:
    """Return the KV heads of one layer; ``common`` are those of a layer for which the config.json says nothing else."""
    per_layer = data.get("per_layer_config")
    if isinstance(per_layer, Mapping):
        own = per_layer.get(str(layer), per_layer.get(layer))
        if not isinstance(own, Mapping):
            return common
        return KvHeads(count_of(own, "num_key_value_heads", common.heads), count_of(own, "head_dim", common.head_dim))
    if not (is_full and str(data.get("model_type")).startswith("gemma4")):
        return common
    # Transformers heeds the KV heads only of a model whose full layers have no values of their own.
    count = _first(data, "num_global_key_value_heads") if data.get("attention_k_eq_v") else 0
    return KvHeads(count or common.heads, count_of(data, "global_head_dim", common.head_dim))


def intermediate_of(data: Data, experts: Experts | None) -> int:
    """Return the intermediate size of a dense MLP; that of an expert where a model has no other."""
    if _is_llama4(data) and data.get("intermediate_size_mlp"):
        return count_of(data, "intermediate_size_mlp")
    return count_of(data, "intermediate_size", experts.intermediate if experts else None)


def gates_attention(data: Data) -> bool:
    """Tell whether the query projection also computes an output gate of the same width (Qwen3-Next, Qwen3.5)."""
    return bool(data.get("attn_output_gate", str(data.get("model_type")).startswith(("qwen3_next", "qwen3_5"))))


def experts_of(data: Data, layers: int) -> Experts | None:
    """Return the mixture of experts that a config.json describes; None for a dense model."""
    count = _first(data, "num_experts", "num_local_experts", "n_routed_experts")
    if not count:
        return None
    intermediate = _first(data, "moe_intermediate_size") or count_of(data, "intermediate_size")
    shared = _first(
        data, "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"
    )
    if not shared:
        shared = intermediate * _first(data, "n_shared_experts")
    if _is_llama4(data):
        shared = intermediate
    elif str(data.get("model_type")).startswith("gemma4"):
        shared = count_of(data, "intermediate_size")  # Every layer adds a dense MLP and its experts.
    kinds, step = _layer_kinds(data, layers), _first(data, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    mlp_only = data.get("mlp_only_layers") or []
    if not isinstance(mlp_only, list):
        raise ModelError(f"mlp_only_layers: got {show(mlp_only)}, expected a list of layers")
    dense = {*range(min(layers, _first(data, "first_k_dense_replace"))), *mlp_only}
    if "E" in kinds:
        sparse_layers = kinds.count("E")
    else:
        sparse_layers = sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
    per_token = _first(data, "num_experts_per_tok", "top_k_experts")
    if not 0 < per_token <= count:
        raise ModelError(f"num_experts_per_tok: got {per_token}, expected 1 to {count}")
    return Experts(count, per_token, intermediate, shared, sparse_layers)


def mixer_params(data: Data) -> int:
    """Return the number of weights of one layer without attention, its MLP excluded.

    Known kinds: gated delta net (Qwen3-Next, Qwen3.5), Mamba 2, short convolution (LFM2).
    """
    hidden = count_of(data, "hidden_size")
    if data.get("linear_num_value_heads"):
        key, value = _delta_widths(data)
        return hidden * (2 * key + 2 * value + 2 * count_of(data, "linear_num_value_heads")) + value * hidden
    if _mamba_heads(data):
        inner, both = _mamba_widths(data)
        return hidden * (2 * inner + both + _mamba_heads(data)) + inner * hidden
    return 4 * hidden * hidden


def state_bytes(data: Data, layers: int) -> int:
    """Return an upper bound of the recurrent state of one sequence in ``layers`` layers without attention, in bytes."""
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
    """Return the number of matrices of one MLP: gate, up and down; Nemotron's squared ReLU has no gate."""
    return 2 if str(data.get("mlp_hidden_act")) == "relu2" else 3


def stands_alone(data: Data, layers: int) -> bool:
    """Tell whether each layer is either a mixer or an MLP, instead of a mixer followed by an MLP (Nemotron-H)."""
    return "*" in _layer_kinds(data, layers)


def dense_mlps(data: Data, layers: int, experts: Experts | None) -> int:
    """Return the number of layers with a dense MLP."""
    if stands_alone(data, layers):
        return _layer_kinds(data, layers).count("-")
    return layers - (experts.layers if experts else 0)


def _layer_kinds(data: Data, layers: int) -> list[str]:
    """Return the kind of each layer as the config.json names it; empty if the file names no kinds."""
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
    for key, mixer in (("full_attn_idxs", "conv"), ("attn_layer_indices", "mamba")):
        attention_layers = data.get(key)
        if isinstance(attention_layers, list):
            return ["full_attention" if layer in attention_layers else mixer for layer in range(layers)]
    for key in ("attn_layer_period", "attn_type_list", "attention_chunk_size"):
        if data.get(key) and not has_chunks(data):
            raise ModelError(f"{key}: which layers attend, and how, is not read from it; such models are not planned")
    return []


def _first(data: Data, *keys: str) -> int:
    """Return the integer under the first of the keys that is set; 0 if none is set."""
    return next((count_of(data, key) for key in keys if data.get(key)), 0)


def _delta_widths(data: Data) -> tuple[int, int]:
    """Return the width of all keys and the width of all values of a gated delta net."""
    key = count_of(data, "linear_num_key_heads") * count_of(data, "linear_key_head_dim")
    return key, count_of(data, "linear_num_value_heads") * count_of(data, "linear_value_head_dim")


def _mamba_heads(data: Data) -> int:
    """Return the number of Mamba 2 heads; 0 if the model has no Mamba layers."""
    return _first(data, "mamba_num_heads", "mamba_n_heads")


def _mamba_widths(data: Data) -> tuple[int, int]:
    """Return the inner width of a Mamba 2 layer, and the width of its B and C together."""
    inner = _mamba_heads(data) * _first(data, "mamba_head_dim", "mamba_d_head")
    return inner, 2 * _first(data, "n_groups", "mamba_n_groups") * _first(data, "ssm_state_size", "mamba_d_state")


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json describes quantised weights, which have fewer bits than the dtype."""
    return any(level.get("quantization_config") for level in _levels(config))


def has_delta_nets(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json describes layers that are gated delta nets (Qwen3-Next, Qwen3.5 and derivatives)."""
    layer_types = (level.get("layer_types") for level in _levels(config) if level.get("linear_num_value_heads"))
    return any(kinds is None or (isinstance(kinds, list) and "linear_attention" in kinds) for kinds in layer_types)


def _levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the mappings of a config.json: the outer one and, for a multimodal model, ``text_config``."""
    return [level for level in (config, config.get("text_config")) if isinstance(level, Mapping)]
