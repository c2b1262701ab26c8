"""A model's shape and the bytes of its weights, read from ``config.json`` and the headers of safetensors files.

The module loads no weights and imports no engine.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybrid_backend.batch import LayerShape, ModelSpec
from hybrid_backend.config.reading import is_folder, read_object, reading
from hybrid_backend.config.rules import MOST, is_int, show
from hybrid_backend.errors import ModelError
from hybrid_backend.host_memory import uncached_bytes
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.model_layers import (
    ASSUMED,
    Experts,
    KvHeads,
    count_of,
    dense_mlps,
    experts_of,
    gates_attention,
    has_chunks,
    intermediate_of,
    is_quantised,
    kv_heads_of,
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
"""Advice that error messages about damaged files end with."""
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the safetensors dtypes that an engine converts to its own dtype."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and gated MLPs.

    Attributes:
        layers: number of decoder layers.
        tied: the output matrix is the embedding matrix.
        weight_bytes: bytes of all weights.
        kv_heads: KV heads of the layers with full attention.
        head_dim: size of their heads.
        windows: per layer the tokens of its sliding window or chunk, None for full attention, 0 for a layer without
            attention (state-space, linear attention, convolution, or an MLP alone). The planner takes the time of a
            layer without attention for that of an attention layer with an empty context.
        max_context: longest sequence in tokens. None: unknown.
        experts: mixture of experts. None: all MLPs are dense.
        state_bytes: recurrent state of one sequence, summed over all layers without attention.
        weights_are_counted: the weights are quantised and their files are missing, so ``weight_bytes`` is an upper
            estimate, for unquantised weights in ``dtype``.
        window_heads: KV heads of the layers with windows. None: those of the layers with full attention.
        has_chunks: windows are chunks of the sequence, of which a layer attends the last one (Llama 4).
        kv_dtype: type of K and V in pages, ``auto`` or ``int8`` (`HybridConfig.kv_dtype`).
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
    window_heads: KvHeads | None = None
    has_chunks: bool = False
    kv_dtype: str = "auto"

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of ``dtype``."""
        return DTYPES[self.dtype].itemsize

    @property
    def attention_params(self) -> int:
        """Mean number of weights of the Q, K, V and O projections of a layer with attention."""
        heads = [self.heads_of(window) for window in self.attention_windows or (None,)]
        return self.output_params + self.hidden * sum(dim * (self.heads + 2 * n) for n, dim in heads) // len(heads)

    @property
    def output_params(self) -> int:
        """Mean number of weights of the O projection of a layer with attention."""
        sizes = [self.heads_of(window).head_dim for window in self.attention_windows or (None,)]
        return self.hidden * self.heads * sum(sizes) // len(sizes)

    def heads_of(self, window: int | None) -> KvHeads:
        """Return the KV heads of a layer with this window; None: full attention."""
        full = KvHeads(self.kv_heads, self.head_dim)
        return full if window is None or self.window_heads is None else self.window_heads

    def mlp_params(self, rows: int = 1) -> float:
        """Return the mean number of MLP weights per layer that a batch of ``rows`` tokens reads.

        In a layer with experts, the more tokens a batch has, the more experts the batch reads.
        """
        dense = 3.0 * self.hidden * self.intermediate
        if self.experts is None:
            return dense
        routed = 3.0 * self.hidden * (self.experts.met(rows) * self.experts.intermediate + self.experts.shared)
        return dense + (routed - dense) * self.experts.layers / self.layers

    @property
    def layer_params(self) -> int:
        """Number of weights that one token multiplies in one decoder layer: Q, K, V and O projections plus the MLP."""
        return self.attention_params + round(self.mlp_params())

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of the weights that one token multiplies in one decoder layer."""
        return self.layer_params * self.dtype_bytes

    @property
    def head_weight_bytes(self) -> int:
        """Bytes of the output matrix (LM head), which is read once per step."""
        return self.vocab * self.hidden * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.kv_format(1).token_bytes

    @property
    def full_layers(self) -> int:
        """Number of layers with full attention."""
        return sum(window is None for window in self.windows)

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """``windows`` of the layers with K and V, full or sliding. The runtime numbers only these layers."""
        return tuple(window for window in self.windows if window != 0)

    def kv_format(self, page_size: int, window: int | None = None) -> KvFormat:
        """Return the format of pages of ``page_size`` tokens in a layer with this window; None: full attention."""
        kv_heads, head_dim = self.heads_of(window)
        return KvFormat(kv_heads, page_size, head_dim, torch.int8 if self.kv_dtype == "int8" else DTYPES[self.dtype])

    def page_bytes(self, page_size: int, window: int | None = None) -> int:
        """Return the bytes of K and V of one page of one layer with this window; None: full attention."""
        return self.kv_format(page_size, window).page_bytes


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape that the content of a ``config.json`` describes. ``name`` is the model's name.

    Raises:
        ModelError: a key is missing or its value is not supported; the message names the key.
    """
    source = f"{name}: config.json"
    with reading(source, _FIX, ModelError):
        try:
            return _shape(config, name)
        except ModelError as error:
            raise ModelError(f"{source}: {error}") from None


def _shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of `shape_from_config`; errors do not name the model."""
    text = config.get("text_config")
    # A multimodal model has the decoder's values in ``text_config``, which take precedence over the outer values.
    data: dict[str, Any] = {**config, **text} if isinstance(text, Mapping) else dict(config)
    data = {**ASSUMED.get(str(data.get("model_type")), {}), **data}
    if data.get("kv_lora_rank"):
        raise ModelError("kv_lora_rank (MLA): only models with GQA can be planned")
    layers = count_of(data, "num_hidden_layers", most=MOST_LAYERS)
    heads = count_of(data, "num_attention_heads")
    hidden = count_of(data, "hidden_size")
    windows = windows_of(data, layers)
    full, local = kv_heads_of(data, windows, heads)
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    for kv_heads in (full.heads, local.heads):
        if heads % kv_heads:
            raise ModelError(f"{heads} query heads cannot share {kv_heads} KV heads; check num_key_value_heads")
    tied = bool(data.get("tie_word_embeddings", False))
    experts = experts_of(data, layers)
    context = data.get("max_position_embeddings")
    shape = ModelShape(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=full.heads,
        head_dim=full.head_dim,
        hidden=hidden,
        intermediate=intermediate_of(data, experts),
        vocab=count_of(data, "vocab_size"),
        dtype=dtype,
        tied=tied,
        weight_bytes=0,
        windows=windows,
        max_context=context if isinstance(context, int) and 0 < context <= MOST else None,
        experts=experts,
        state_bytes=state_bytes(data, windows.count(0)),
        window_heads=None if local == full else local,
        has_chunks=has_chunks(data),
    )
    tables = shape.vocab * hidden * (1 if tied else 2)
    norms = (2 * layers + 1) * hidden  # Further norms and biases are left out: under 0.1 % of a model's bytes.
    total = (_all_params(data, shape) + tables + norms) * shape.dtype_bytes
    return replace(shape, weight_bytes=total)


def _all_params(data: Mapping[str, Any], shape: ModelShape) -> int:
    """Return the number of weights of all layers, without embeddings and norms."""
    attention_layers, mixers = len(shape.attention_windows), shape.windows.count(0)
    gates = shape.hidden * shape.head_dim * shape.heads if gates_attention(data) else 0
    total = attention_layers * (shape.attention_params + gates)
    matrices, experts = mlp_matrices(data), shape.experts
    if stands_alone(data, shape.layers):
        mlps = dense_mlps(data, shape.layers, experts)
        mixers -= mlps + (experts.layers if experts else 0)
    total += mixers * mixer_params(data)
    total += dense_mlps(data, shape.layers, experts) * matrices * shape.hidden * shape.intermediate
    if experts is not None:
        width = experts.count * experts.intermediate + experts.shared
        total += experts.layers * shape.hidden * (matrices * width + experts.count)
    return total


def spec_of(shape: ModelShape, max_tokens: int | None = None) -> ModelSpec:
    """Return the runtime's `ModelSpec` for one rank without tensor parallelism.

    Args:
        shape: shape of the model.
        max_tokens: longest sequence that the engine admits. None: no limit.
    """
    local = shape.window_heads
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
        window_shape=None if local is None else LayerShape(shape.heads, *local, local.head_dim**-0.5),
        kv_dtype=torch.int8 if shape.kv_dtype == "int8" else None,
    )


def weight_bytes(folder: Path, itemsize: int, stated_itemsize: int) -> int | None:
    """Return the bytes of a model's weights as loaded, from headers of safetensors files or else from their index.

    Args:
        folder: folder of the model's files.
        itemsize: bytes per element of the dtype that the engine converts floats to.
        stated_itemsize: bytes per element of the dtype in ``config.json``, by which the index's total is scaled.

    Returns:
        Bytes; None if the folder has neither all files nor an index with a total.

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


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the weights in a folder; empty if a file that the index lists is missing."""
    index = folder / WEIGHTS_INDEX
    listed = _listed(index) if index.is_file() else set()
    files = sorted(folder.glob("*.safetensors"))
    if not listed <= {file.name for file in files}:
        return []
    return [file for file in files if not listed or file.name in listed]


def _listed(index: Path) -> set[str]:
    """Return the names of the files that an index lists."""
    files = read_json(index).get("weight_map", {})
    if not isinstance(files, Mapping) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(f"{index}: weight_map: expected a file name for each tensor; fetch the model again")
    return set(files.values())


def stored_bytes(model: str, revision: str | None = None) -> int:
    """Return the bytes of a model's safetensors files on disk; 0 if a file is missing.

    Args:
        model: folder, or hub id of a model in the hub's cache.
        revision: revision of the hub model. None: the default branch.
    """
    folder = _folder(model, revision)
    return 0 if folder is None else sum(file.stat().st_size for file in weight_files(folder))


def weights_to_load(model: str, config: Mapping[str, Any], dtype: str, revision: str | None = None) -> tuple[int, int]:
    """Predict the host memory and the disk reads that an engine needs to load a model.

    Args:
        model: folder or hub id.
        config: content of the model's config.json as the engine read it.
        dtype: dtype that the engine computes in, for example bfloat16, and converts floats to.
        revision: revision of the hub model. None: the default branch.

    Returns:
        Bytes of all weights, 0 if unknown; and bytes of weight files that are not in the page cache.
    """
    size = DTYPES[dtype].itemsize
    stated = str(config.get("dtype") or config.get("torch_dtype") or dtype).removeprefix("torch.")
    stated_size = DTYPES[stated].itemsize if stated in DTYPES else size
    folder = _folder(model, revision)
    if folder is None:  # The engine will download and read all files.
        counted = _counted(config, dtype)
        return counted, counted // size * stated_size
    files, stored = weight_files(folder), weight_bytes(folder, size, stated_size)
    counted = stored or _counted(config, dtype)
    return counted, uncached_bytes(files) if files else counted // size * stated_size


def _folder(model: str, revision: str | None) -> Path | None:
    """Return a model's folder: the directory itself, or the folder of a hub id in the hub's cache."""
    if is_folder(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config_file = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # The model is not a hub id, but for example a file or a URL.
        return None
    return Path(config_file).parent if isinstance(config_file, str) else None


def _counted(config: Mapping[str, Any], dtype: str) -> int:
    """Return the bytes of the weights by the model's shape; 0 if the shape is unknown or the weights are quantised."""
    if is_quantised(config):
        return 0
    try:
        return shape_from_config({**config, "dtype": dtype}, "").weight_bytes
    except ModelError:
        return 0


def _tensor_bytes(file: Path, itemsize: int) -> int:
    """Return the bytes of all tensors of a safetensors file, with ``itemsize`` bytes per float."""
    with reading(file, _FIX, ModelError, "safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))  # length of the JSON header
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
    """Return the JSON object in one of a model's files; raise ModelError if the file cannot be read."""
    return read_object(file, _FIX, ModelError)
