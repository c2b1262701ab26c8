"""What the MODEL argument of a command stands for."""

from __future__ import annotations

import re

from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import is_file, is_folder
from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub.catalog import entries
from hybrid_backend.tools.hub.fetch import fetch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_HUB_ID_LENGTH = 96  # limit of the hub (huggingface_hub, utils/_validators.py)


def resolve_model(model: str) -> str:
    """What to hand to the engine for `model`.

    A name of the catalog becomes its local directory (fetched if missing); a directory with a config.json and
    a hub id (`org/name`) stay as they are. Anything else is a `ModelError` that says what was tried.
    """
    checked = check_model(model)
    return str(fetch(model)) if checked is None else checked


def check_model(model: str) -> str | None:
    """Return what `resolve_model` returns, but None for a name of the catalog, of which nothing is fetched.

    Raises:
        ModelError: no model is called ``model``.
    """
    names = [entry.name for entry in entries()]
    if model.lower() in names:
        return None
    if not model.strip():
        raise ModelError("MODEL is empty; give a catalog name, a directory with a config.json, or org/name")
    if is_file(path := user_path(model) / "config.json"):
        return str(path.parent)
    if is_folder(model):
        raise ModelError(f"directory {model} has no config.json; give a model in Hugging Face format")
    if is_file(model):
        raise ModelError(f"{model} is a file; give a directory in Hugging Face format, or org/name")
    if len(model) <= _HUB_ID_LENGTH and _HUB_ID.fullmatch(model):
        return model
    raise ModelError(
        f"model {model!r} is neither in the catalog ({', '.join(names)}) nor a directory with a "
        "config.json nor a hub id like org/name; give one of these"
    )
