"""Resolution of the MODEL argument of a command."""

from __future__ import annotations

import re
from difflib import get_close_matches

from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import is_file, is_folder
from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub.catalog import entries
from hybrid_backend.tools.hub.fetch import fetch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_ID_LENGTH = 96
"""Limit of the hub (huggingface_hub, utils/_validators.py)."""


def resolve_model(model: str) -> str:
    """Return the directory or hub id that an engine gets for ``model``. A model of the catalog is fetched if needed.

    Raises:
        ModelError: ``model`` is no catalog name, no directory with a config.json and no hub id (``org/name``).
    """
    checked = check_model(model)
    return str(fetch(model)) if checked is None else checked


def check_model(model: str) -> str | None:
    """Return the same as `resolve_model` without fetching; None for a name of the catalog.

    Raises:
        ModelError: see `resolve_model`.
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
    meant = _meant(model, names)
    raise ModelError(
        f"model {model!r} is neither in the catalog ({', '.join(names)}) nor a directory with a "
        f"config.json nor a hub id like org/name; {f'did you mean {meant}?' if meant else 'give one of these'}"
    )


def _meant(model: str, names: list[str]) -> str | None:
    """Return the catalog name or hub id that a name comes nearest to; None if it is near to none.

    A catalog name that only misses its end goes before the hub's base model of the shorter name.
    """
    if begun := [name for name in names if name.startswith(model.lower())]:
        return begun[0]
    from hybrid_backend.tools.plan.published import PUBLISHED  # `plan` resolves models by this module.

    full_names = {name: entry.hub_id for name, entry in PUBLISHED.items()}
    full_names |= {hub_id.partition("/")[2].lower(): hub_id for hub_id in [*full_names.values()]}
    full_names |= {name: name for name in names}
    near = get_close_matches(model.lower(), full_names, n=1, cutoff=0.75)
    return full_names[near[0]] if near else None
