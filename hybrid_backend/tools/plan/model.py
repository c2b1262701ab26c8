"""Resolution of MODEL on the command line to the shape that is planned."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from huggingface_hub import try_to_load_from_cache

from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import is_file, is_folder
from hybrid_backend.engines.cpu_defaults import float32_is_better
from hybrid_backend.errors import ModelError
from hybrid_backend.model import (
    DTYPES,
    WEIGHTS_INDEX,
    ModelShape,
    read_json,
    shape_from_config,
    weight_bytes,
)
from hybrid_backend.model_layers import has_delta_nets, is_quantised
from hybrid_backend.tools.hub import check_hub, resolve_model
from hybrid_backend.tools.hub.catalog import entries
from hybrid_backend.tools.hub.fetch import models_dir
from hybrid_backend.tools.plan.published import published, relative


def find_shape(model: str, dtype: str = "auto", float32_room: int | None = None) -> ModelShape:
    """Return the shape of a model, from local files, else from the published shapes, else from the hub.

    Args:
        model: catalog name, directory, ``config.json``, hub id (two small files are read), or the short
            name of a published model.
        dtype: type that the engine computes in. auto: the model's own, and bfloat16 for a float32 model (vLLM 0.32,
            config/model.py, ``_resolve_auto_dtype``).
        float32_room: memory of a CPU that emulates bf16; auto is then float32 where `hybrid serve` chooses that
            (`float32_is_better`). None: bf16 is not emulated.

    Returns:
        The shape. Its name is another hub id if ``model`` is taken to have the shape of that model by its name.

    Raises:
        ModelError: no such model, or one that cannot be planned.
    """
    file = user_path(model)
    if is_file(file) and file.suffix == ".json":
        return _served(read_json(file), _name(model, file), dtype, float32_room, file.parent)
    folder = _local_folder(model)
    if folder is not None:
        return _served(read_json(folder / "config.json"), model, dtype, float32_room, folder)
    if (entry := published(model)) is not None:
        return _served(entry.config, model, dtype, float32_room)
    entry = relative(model)
    if entry is not None and "/" not in model:
        return _served(entry.config, entry.hub_id, dtype, float32_room)
    resolved = Path(resolve_model(model))
    try:
        folder = resolved if is_folder(resolved) else _from_hub(model)
    except ModelError:
        if entry is None:
            raise
        return _served(entry.config, entry.hub_id, dtype, float32_room)
    return _served(read_json(folder / "config.json"), model, dtype, float32_room, folder)


def _served(
    config: Mapping[str, Any], name: str, dtype: str, float32_room: int | None, folder: Path | None = None
) -> ModelShape:
    """Return the shape in ``config`` as `hybrid serve` serves it. ``folder`` may have the weights or their index."""
    shape = _in_dtype(config, name, dtype, folder)
    if dtype != "auto" or float32_room is None or is_quantised(config) or has_delta_nets(config):
        return shape
    is_better = float32_is_better(shape.dtype, shape.weight_bytes, float32_room, emulates_bf16=True)
    return _in_dtype(config, name, "float32", folder) if is_better else shape


def _in_dtype(config: Mapping[str, Any], name: str, dtype: str, folder: Path | None) -> ModelShape:
    """Return the shape in ``config`` with weights in ``dtype``; auto: the dtype that vLLM chooses."""
    stated = shape_from_config(config, name)
    served = stated.dtype if dtype == "auto" else dtype
    if dtype == "auto" and stated.dtype == "float32":
        served = "bfloat16"
    if served not in DTYPES:
        raise ModelError(f"dtype {dtype!r}: write auto or one of {', '.join(DTYPES)}")
    size = DTYPES[served].itemsize
    if not stated.full_layers:
        raise ModelError(f"{name}: no layer has full attention, so there is nothing to offload")
    stored = None if folder is None else weight_bytes(folder, size, stated.dtype_bytes)
    counted = stated.weight_bytes // stated.dtype_bytes * size
    return replace(
        stated,
        dtype=served,
        weight_bytes=stored or counted,
        weights_are_counted=not stored and is_quantised(config),
    )


def served_name(model: str) -> str:
    """Return the name that `hybrid serve` takes: a hub id if the model is neither here nor in the catalog."""
    if "/" in model or model.lower() in _catalog() or _local_folder(model) is not None:
        return model
    entry = published(model) or relative(model)
    return entry.hub_id if entry else model


def _catalog() -> list[str]:
    return [entry.name for entry in entries()]


def _local_folder(model: str) -> Path | None:
    """Return the local folder with the model's ``config.json``; None if there is none.

    It is the directory itself, a fetched model of the catalog, or a folder of the hub's own cache.
    """
    folders = [user_path(model)] if model.strip() else []
    if model.lower() in _catalog():
        folders.append(models_dir() / model.lower())
    with suppress(ValueError):  # The name is not a hub id.
        cached = try_to_load_from_cache(model, "config.json")
        folders += [Path(cached).parent] if isinstance(cached, str) else []
    return next((folder for folder in folders if is_file(folder / "config.json")), None)


def _name(model: str, file: Path) -> str:
    return file.parent.resolve().name if model.endswith(".json") else model


def _from_hub(model: str) -> Path:
    """Fetch a model's ``config.json`` and its weights' index, if it has one; return their folder in the hub's cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    check_hub(model)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # The library logs a warning for each retry.
    try:
        config = Path(hf_hub_download(model, "config.json"))
        with suppress(EntryNotFoundError, HfHubHTTPError, OSError):  # A model in one file has no index.
            hf_hub_download(model, WEIGHTS_INDEX)
        return config.parent
    except (LocalEntryNotFoundError, EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = shorten(str(error), 160, placeholder=" ...")
        raise ModelError(
            f"{model}: its config.json cannot be had from the hub ({reason}); give a directory or a config.json"
        ) from None
