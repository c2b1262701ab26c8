"""From MODEL on the command line to the shape that is planned. Reads files, loads no weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybrid_backend.errors import ModelError
from hybrid_backend.hardware.shape import ModelShape, shape_from_config
from hybrid_backend.host_memory import uncached_bytes
from hybrid_backend.hub import resolve_model
from hybrid_backend.step import ModelSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # safetensors names; the engine casts these to its own dtype
_INDEX = "model.safetensors.index.json"


def find_shape(model: str, dtype: str = "auto") -> ModelShape:
    """The shape of a catalog name, a directory, a ``config.json`` or a hub id (of which only two small files are read).

    Args:
        dtype: what the engine computes in; auto is the model's own, and bfloat16 for a float32 model (vLLM 0.32,
            config/model.py, ``_resolve_auto_dtype``).

    Raises:
        ModelError: no such model, or one that cannot be planned.
    """
    file = Path(model).expanduser()
    if not (file.is_file() and file.suffix == ".json"):
        found = Path(resolve_model(model))
        file = found / "config.json" if found.is_dir() else _from_hub(model)
    config = _read_json(file)
    name = model if file.suffix != ".json" or file.name != "config.json" else _name(model, file)
    stated = shape_from_config(config, name)
    served = stated.dtype if dtype == "auto" else dtype
    if dtype == "auto" and stated.dtype == "float32":
        served = "bfloat16"
    if served not in DTYPES:
        raise ModelError(f"dtype {dtype!r}: write auto or one of {', '.join(DTYPES)}")
    size = DTYPES[served].itemsize
    stored = weight_bytes(file.parent, size, stated.dtype_bytes)
    counted = stated.weight_bytes // stated.dtype_bytes * size
    return replace(stated, dtype=served, weight_bytes=stored or counted)


def spec_of(shape: ModelShape, max_tokens: int | None = None) -> ModelSpec:
    """The shape as the runtime sees it (on one rank; the scale of the logits plays no part in memory)."""
    return ModelSpec(
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        dtype=DTYPES[shape.dtype],
        windows=shape.windows if any(window is not None for window in shape.windows) else (),
        max_tokens=max_tokens,
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
    index = folder / _INDEX
    total = _read_json(index).get("metadata", {}).get("total_size") if index.is_file() else None
    return None if total is None else int(total) // stated_itemsize * itemsize


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights; empty unless all of them are there."""
    index = folder / _INDEX
    listed = set(_read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    files = sorted(folder.glob("*.safetensors"))
    if not listed <= {file.name for file in files}:
        return []
    return [file for file in files if not listed or file.name in listed]


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
    folder = Path(model)
    if not folder.is_dir():
        found = _cached(model, revision)
        if found is None:  # all of it is fetched, and read
            counted = _counted(config, dtype)
            return counted, counted // size * stated_size
        folder = found
    files, stored = weight_files(folder), weight_bytes(folder, size, stated_size)
    counted = stored or _counted(config, dtype)
    return counted, uncached_bytes(files) if files else counted // size * stated_size


def _cached(model: str, revision: str | None) -> Path | None:
    """Folder of a hub model in the hub's own cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # a file, an address of another kind
        return None
    return Path(found).parent if isinstance(found, str) else None


def _counted(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of the weights by the shape; 0 for one that is not known, or whose weights are quantised."""
    if config.get("quantization_config"):
        return 0
    try:
        return shape_from_config({**config, "dtype": dtype}, "").weight_bytes
    except ModelError:
        return 0


def _tensor_bytes(file: Path, itemsize: int) -> int:
    """Of one safetensors file: 8 bytes little-endian length, then a JSON header of that length."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        total = 0
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                stored = _FLOATS.get(tensor["dtype"])
                total += (end - begin) // stored * itemsize if stored else end - begin
        return total
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file}: not a safetensors file ({error}); fetch the model again") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error}); fetch the model again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{file}: got {type(data).__name__}, expected a JSON object; fetch the model again")
    return data


def _name(model: str, file: Path) -> str:
    return file.parent.resolve().name if model.endswith(".json") else model


def _from_hub(model: str) -> Path:
    """``config.json`` of a hub model (and its weights' index, if there is one) in the hub's own cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(model, "config.json"))
        with suppress(EntryNotFoundError, HfHubHTTPError, OSError):  # a model in one file has none
            hf_hub_download(model, _INDEX)
        return config
    except (LocalEntryNotFoundError, EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelError(
            f"{model}: its config.json cannot be had from the hub ({reason}); give a directory or a config.json"
        ) from None
