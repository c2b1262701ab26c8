"""The shape of a model as memory and time see it, from its Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_backend.errors import ModelError

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder-only transformer with grouped-query attention and a gated MLP.

    ``windows[layer]``: the sliding window in tokens of a local layer, None for full attention.
    ``weight_bytes``: all weights; ``layer_weight_bytes``: the matrices of one layer, which each step reads.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    dtype: str
    tied: bool
    weight_bytes: int
    windows: tuple[int | None, ...]
    max_context: int | None = None

    @property
    def dtype_bytes(self) -> int:
        return _BYTES[self.dtype]

    @property
    def layer_params(self) -> int:
        """Of the matrices of one layer: Q, K, V, O and the three of the MLP."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer_weight_bytes(self) -> int:
        return self.layer_params * self.dtype_bytes

    @property
    def head_weight_bytes(self) -> int:
        """The output matrix, read once a step."""
        return self.vocab * self.hidden * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def full_layers(self) -> int:
        return sum(window is None for window in self.windows)

    def page_bytes(self, page_size: int) -> int:
        """K and V of one page of one layer."""
        return page_size * self.token_bytes


def read_shape(path: str | Path) -> ModelShape:
    """The shape in a model directory, or in a ``config.json`` itself.

    Weights are as large as the directory's safetensors files where it has any, else as the shape says.
    """
    given = Path(path).expanduser()
    file = given / "config.json" if given.is_dir() else given
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file; give a model directory with a Hugging Face config.json") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error}); fetch the model again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{file}: got {type(data).__name__}, expected a JSON object; fetch the model again")
    on_disk = sum(f.stat().st_size for f in file.parent.glob("*.safetensors"))
    name = file.parent.name if file.name == "config.json" else file.stem
    return shape_from_config(data, name, on_disk or None)


def shape_from_config(config: Mapping[str, Any], name: str, weight_bytes: int | None = None) -> ModelShape:
    """The shape in the content of a ``config.json``; ModelError names the key that is missing or not supported."""
    text = config.get("text_config")
    # A multimodal model keeps its decoder's numbers one level down; what both levels have, the inner one says.
    data: dict[str, Any] = {**config, **text} if isinstance(text, Mapping) else dict(config)
    for key, what in (("kv_lora_rank", "MLA"), ("num_experts", "experts"), ("num_local_experts", "experts"),
                      ("n_routed_experts", "experts")):  # fmt: skip
        if data.get(key):
            raise ModelError(f"{name}: config.json has {key} ({what}); only dense models with GQA can be planned")
    layers = _count(data, "num_hidden_layers", name)
    heads = _count(data, "num_attention_heads", name)
    hidden = _count(data, "hidden_size", name)
    kv_heads = _count(data, "num_key_value_heads", name, heads)
    head_dim = _count(data, "head_dim", name, hidden // heads)
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _BYTES:
        raise ModelError(f"{name}: config.json has dtype {dtype!r}, expected one of {', '.join(_BYTES)}")
    if heads % kv_heads:
        raise ModelError(f"{name}: {heads} query heads cannot share {kv_heads} KV heads; check num_key_value_heads")
    tied = bool(data.get("tie_word_embeddings", _TIED.get(str(data.get("model_type")), False)))
    windows = _windows(data, layers)
    context = data.get("max_position_embeddings")
    shape = ModelShape(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        intermediate=_count(data, "intermediate_size", name),
        vocab=_count(data, "vocab_size", name),
        dtype=dtype,
        tied=tied,
        weight_bytes=weight_bytes or 0,
        windows=windows,
        max_context=context if isinstance(context, int) else None,
    )
    if weight_bytes:
        return shape
    tables = shape.vocab * hidden * (1 if tied else 2)
    norms = (2 * layers + 1) * hidden  # bf16 weights of a few more norms and biases are < 0.1 % of a model
    total = (layers * shape.layer_params + tables + norms) * shape.dtype_bytes
    return ModelShape(**{**shape.__dict__, "weight_bytes": total})


# What transformers' configuration classes assume where config.json does not say.
_TIED = {"gemma3": True, "gemma3_text": True}


def _count(data: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = data.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name}: config.json: {key}: got {value!r}, expected an integer >= 1")
    return value


def _windows(data: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = data.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or data.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = data.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    pattern = data.get("sliding_window_pattern") or (6 if str(data.get("model_type")).startswith("gemma3") else None)
    if isinstance(pattern, int) and pattern > 0:  # every pattern-th layer is global
        return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))
    first = data.get("max_window_layers") if data.get("use_sliding_window") else 0  # Qwen2: full up to this layer
    return tuple(window if layer >= int(first or 0) else None for layer in range(layers))
