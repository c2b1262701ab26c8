"""A model as memory and time see it, from its files: its shape (``config.json``) and what its weights take
(safetensors headers). Loads no weights, imports no engine."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config.reading import is_folder, read_object, reading
from hybrid_backend.config.rules import MOST, is_int, show
from hybrid_backend.errors import ModelError
from hybrid_backend.host_memory import uncached_bytes
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.model_layers import (
    Experts,
    count_of,
    dense_mlps,
    experts_of,
    mixer_params,
    mlp_matrices,
    stands_alone,
    state_bytes,
    windows_of,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WEIGHTS_INDEX = "model.safetensors.index.json"
MOST_LAYERS = 10_000
_FIX = "fetch the model again"
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # safetensors names; the engine casts these to its own dtype


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and gated MLPs.

    ``layers``: all decoder layers; ``windows[layer]``: None for full attention, the sliding window in tokens of a local
    layer, 0 for a layer of another kind (state-space, linear attention, convolution, or an MLP by itself), whose time
    is taken for that of a layer with nothing to attend.
    ``weight_bytes``: all weights; ``layer_weight_bytes``: the matrices of one layer that one token passes.
    ``state_bytes``: what one sequence keeps in all layers of other kinds together.
    ``weights_are_counted``: the weights are quantised and their files are not here, so that ``weight_bytes`` is what
    they would weigh in ``dtype``.
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
    experts: Experts | None = None
    state_bytes: int = 0
    weights_are_counted: bool = False

    @property
    def dtype_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def attention_params(self) -> int:
        """Of the matrices Q, K, V and O of one layer."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def mlp_params(self, rows: int = 1) -> float:
        """Of the matrices that ``rows`` tokens meet after the attention of one layer; the mean over all layers."""
        dense = 3.0 * self.hidden * self.intermediate
        if self.experts is None:
            return dense
        routed = 3.0 * self.hidden * (self.experts.met(rows) * self.experts.intermediate + self.experts.shared)
        return dense + (routed - dense) * self.experts.layers / self.layers

    @property
    def layer_params(self) -> int:
        """Of the matrices of one layer that one token passes: Q, K, V, O and those of the MLP."""
        return self.attention_params + round(self.mlp_params())

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
        return self.kv_format(1).token_bytes

    @property
    def full_layers(self) -> int:
        return sum(window is None for window in self.windows)

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """``windows`` of the layers that keep K and V: those that the runtime counts."""
        return tuple(window for window in self.windows if window != 0)

    def kv_format(self, page_size: int) -> KvFormat:
        """Return the format of pages of ``page_size`` tokens."""
        return KvFormat(self.kv_heads, page_size, self.head_dim, DTYPES[self.dtype])

    def page_bytes(self, page_size: int) -> int:
        """K and V of one page of one layer."""
        return self.kv_format(page_size).page_bytes


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape in the content of a ``config.json``; ModelError names the key that is missing or not supported."""
    source = f"{name}: config.json"
    with reading(source, _FIX, ModelError):
        try:
            return _shape(config, name)
        except ModelError as error:
            raise ModelError(f"{source}: {error}") from None


def _shape(config: Mapping[str, Any], name: str) -> ModelShape:
    text = config.get("text_config")
    # A multimodal model keeps its decoder's numbers one level down; what both levels have, the inner one says.
    data: dict[str, Any] = {**config, **text} if isinstance(text, Mapping) else dict(config)
    data = {**_ASSUMED.get(str(data.get("model_type")), {}), **data}
    if data.get("kv_lora_rank"):
        raise ModelError("kv_lora_rank (MLA): only models with GQA can be planned")
    layers = count_of(data, "num_hidden_layers", most=MOST_LAYERS)
    heads = count_of(data, "num_attention_heads")
    hidden = count_of(data, "hidden_size")
    kv_heads = count_of(data, "num_key_value_heads", heads)
    head_dim = count_of(data, "head_dim", hidden // heads)
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads cannot share {kv_heads} KV heads; check num_key_value_heads")
    tied = bool(data.get("tie_word_embeddings", False))
    windows = windows_of(data, layers)
    experts = experts_of(data, layers)
    context = data.get("max_position_embeddings")
    shape = ModelShape(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        intermediate=count_of(data, "intermediate_size", experts.intermediate if experts else None),
        vocab=count_of(data, "vocab_size"),
        dtype=dtype,
        tied=tied,
        weight_bytes=0,
        windows=windows,
        max_context=context if isinstance(context, int) and 0 < context <= MOST else None,
        experts=experts,
        state_bytes=state_bytes(data, windows.count(0)),
    )
    tables = shape.vocab * hidden * (1 if tied else 2)
    norms = (2 * layers + 1) * hidden  # bf16 weights of a few more norms and biases are < 0.1 % of a model
    total = (_all_params(data, shape) + tables + norms) * shape.dtype_bytes
    return replace(shape, weight_bytes=total)


# What transformers' configuration classes assume where config.json does not say.
_GEMMA3 = {
    "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096,
}  # fmt: skip
_ASSUMED: Mapping[str, Mapping[str, Any]] = {"gemma3": _GEMMA3, "gemma3_text": _GEMMA3}


def _all_params(data: Mapping[str, Any], shape: ModelShape) -> int:
    """Of the matrices of all layers."""
    attending, others = len(shape.attention_windows), shape.windows.count(0)
    gates = shape.hidden * shape.head_dim * shape.heads if _gates_attention(data) else 0
    total = attending * (shape.attention_params + gates)
    matrices, experts = mlp_matrices(data), shape.experts
    if stands_alone(data, shape.layers):
        mlps = dense_mlps(data, shape.layers, experts)
        others -= mlps + (experts.layers if experts else 0)
    total += others * mixer_params(data)
    total += dense_mlps(data, shape.layers, experts) * matrices * shape.hidden * shape.intermediate
    if experts is not None:
        each = experts.count * experts.intermediate + experts.shared
        total += experts.layers * shape.hidden * (matrices * each + experts.count)
    return total


def _gates_attention(data: Mapping[str, Any]) -> bool:
    """Whether the query's projection makes a gate of the same width too (Qwen3-Next, Qwen3.5)."""
    return bool(data.get("attn_output_gate", str(data.get("model_type")).startswith(("qwen3_next", "qwen3_5"))))


def spec_of(shape: ModelShape, max_tokens: int | None = None) -> ModelSpec:
    """The shape as the runtime sees it (on one rank; the scale of the logits plays no part in memory)."""
    return ModelSpec(
        num_layers=len(shape.attention_windows),
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        dtype=DTYPES[shape.dtype],
        windows=shape.attention_windows if any(shape.attention_windows) else (),
        max_tokens=max_tokens,
        hidden=shape.hidden,
    )


def weight_bytes(folder: Path, itemsize: int, stated_itemsize: int) -> int | None:
    """Bytes of the weights when floats take ``itemsize`` bytes each, from the headers of the safetensors files; from
    their index where the files themselves are not there; None where neither is.

    Raises:
        ModelError: a file is damaged.
    """
    files = weight_files(folder)
    if files:
        return sum(_tensor_bytes(file, itemsize) for file in files)
    index = folder / WEIGHTS_INDEX
    metadata = read_json(index).get("metadata") if index.is_file() else None
    if not isinstance(metadata, Mapping) or metadata.get("total_size") is None:
        return None
    try:
        return count_of(metadata, "total_size", most=2**63 - 1) // stated_itemsize * itemsize
    except ModelError as error:
        raise ModelError(f"{index}: {error}; fetch the model again") from None


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are stored in fewer bits than it computes in."""
    return any(level.get("quantization_config") for level in _levels(config))


def has_delta_nets(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that some layers are gated delta nets (Qwen3-Next, Qwen3.5 and their kin)."""
    named = (level.get("layer_types") for level in _levels(config) if level.get("linear_num_value_heads"))
    return any(kinds is None or (isinstance(kinds, list) and "linear_attention" in kinds) for kinds in named)


def _levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A config.json, and what it says of the language model of one that sees."""
    return [level for level in (config, config.get("text_config")) if isinstance(level, Mapping)]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights; empty unless all of them are there."""
    index = folder / WEIGHTS_INDEX
    listed = _listed(index) if index.is_file() else set()
    files = sorted(folder.glob("*.safetensors"))
    if not listed <= {file.name for file in files}:
        return []
    return [file for file in files if not listed or file.name in listed]


def _listed(index: Path) -> set[str]:
    """The files that an index names."""
    named = read_json(index).get("weight_map", {})
    if not isinstance(named, Mapping) or not all(isinstance(file, str) for file in named.values()):
        raise ModelError(f"{index}: weight_map: expected a file name for each tensor; fetch the model again")
    return set(named.values())


def stored_bytes(model: str, revision: str | None = None) -> int:
    """Bytes of the safetensors files of a directory, or of a hub id in the hub's own cache; 0 unless all are there."""
    folder = _folder(model, revision)
    return 0 if folder is None else sum(file.stat().st_size for file in weight_files(folder))


def weights_to_load(model: str, config: Mapping[str, Any], dtype: str, revision: str | None = None) -> tuple[int, int]:
    """What an engine will load into host memory, before it does.

    Args:
        model: directory or hub id.
        config: content of its config.json, as the engine read it.
        dtype: that the engine computes in, as bfloat16; floats that are stored in another one are converted.

    Returns:
        bytes of all weights, 0 where neither the files nor the shape tell; bytes of the files that are to be read from
        the disk.
    """
    size = DTYPES[dtype].itemsize
    stated = str(config.get("dtype") or config.get("torch_dtype") or dtype).removeprefix("torch.")
    stated_size = DTYPES[stated].itemsize if stated in DTYPES else size
    folder = _folder(model, revision)
    if folder is None:  # all of it is fetched, and read
        counted = _counted(config, dtype)
        return counted, counted // size * stated_size
    files, stored = weight_files(folder), weight_bytes(folder, size, stated_size)
    counted = stored or _counted(config, dtype)
    return counted, uncached_bytes(files) if files else counted // size * stated_size


def _folder(model: str, revision: str | None) -> Path | None:
    """A directory itself; of a hub model the folder in the hub's own cache."""
    if is_folder(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # a file, an address of another kind
        return None
    return Path(found).parent if isinstance(found, str) else None


def _counted(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of the weights by the shape; 0 for one that is not known, or whose weights are quantised."""
    if is_quantised(config):
        return 0
    try:
        return shape_from_config({**config, "dtype": dtype}, "").weight_bytes
    except ModelError:
        return 0


def _tensor_bytes(file: Path, itemsize: int) -> int:
    """Return the bytes of all tensors of a safetensors file, floats counted with ``itemsize`` bytes."""
    with reading(file, _FIX, ModelError, "safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))  # of the JSON header that follows
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        total = 0
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                if not (is_int(begin) and is_int(end) and 0 <= begin <= end):
                    raise ValueError(f"data_offsets of {show(name)}")
                stored = _FLOATS.get(tensor["dtype"])
                total += (end - begin) // stored * itemsize if stored else end - begin
        return total


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in one of a model's files; ModelError if it cannot be read."""
    return read_object(file, _FIX, ModelError)
