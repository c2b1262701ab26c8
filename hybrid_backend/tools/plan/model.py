"""From MODEL on the command line to the shape that is planned."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import is_file, is_folder
from hybrid_backend.errors import ModelError
from hybrid_backend.model import (
    DTYPES,
    WEIGHTS_INDEX,
    ModelShape,
    is_quantised,
    read_json,
    shape_from_config,
    weight_bytes,
)
from hybrid_backend.tools.hub import resolve_model


def find_shape(model: str, dtype: str = "auto") -> ModelShape:
    """The shape of a catalog name, a directory, a ``config.json`` or a hub id (of which only two small files are read).

    Args:
        dtype: what the engine computes in; auto is the model's own, and bfloat16 for a float32 model (vLLM 0.32,
            config/model.py, ``_resolve_auto_dtype``).

    Raises:
        ModelError: no such model, or one that cannot be planned.
    """
    file = user_path(model)
    if not (is_file(file) and file.suffix == ".json"):
        found = Path(resolve_model(model))
        file = found / "config.json" if is_folder(found) else _from_hub(model)
    config = read_json(file)
    name = model if file.suffix != ".json" or file.name != "config.json" else _name(model, file)
    stated = shape_from_config(config, name)
    served = stated.dtype if dtype == "auto" else dtype
    if dtype == "auto" and stated.dtype == "float32":
        served = "bfloat16"
    if served not in DTYPES:
        raise ModelError(f"dtype {dtype!r}: write auto or one of {', '.join(DTYPES)}")
    size = DTYPES[served].itemsize
    if not stated.full_layers:
        raise ModelError(f"{name}: no layer has full attention, so there is nothing to offload")
    stored = weight_bytes(file.parent, size, stated.dtype_bytes)
    counted = stated.weight_bytes // stated.dtype_bytes * size
    return replace(
        stated,
        dtype=served,
        weight_bytes=stored or counted,
        weights_are_counted=not stored and is_quantised(config),
    )


def _name(model: str, file: Path) -> str:
    return file.parent.resolve().name if model.endswith(".json") else model


def _from_hub(model: str) -> Path:
    """``config.json`` of a hub model (and its weights' index, if there is one) in the hub's own cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings of each retry would bury our one line
    try:
        config = Path(hf_hub_download(model, "config.json"))
        with suppress(EntryNotFoundError, HfHubHTTPError, OSError):  # a model in one file has none
            hf_hub_download(model, WEIGHTS_INDEX)
        return config
    except (LocalEntryNotFoundError, EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = shorten(str(error), 160, placeholder=" ...")
        raise ModelError(
            f"{model}: its config.json cannot be had from the hub ({reason}); give a directory or a config.json"
        ) from None
