"""Shapes of the models that a configuration is shipped for, so that `hybrid plan` knows them without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hybrid_backend.config.load import find_config


class Published(NamedTuple):
    """A published model: its id on the hub, and the keys of its config.json that decide its shape."""

    hub_id: str
    config: Mapping[str, Any]


PUBLISHED: Mapping[str, Published] = {
    name: Published(**entry)
    for name, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
"""Published models, keyed by the name of the shipped configuration without its ``.yaml``."""


def published(model: str) -> Published | None:
    """Return the published model that ``model`` names by hub id, with or without the owner, or configuration."""
    named = model.lower()
    for name, entry in PUBLISHED.items():
        hub_id = entry.hub_id.lower()
        if named in (name, hub_id, hub_id.partition("/")[2]):
            return entry
    return None


def relative(model: str) -> Published | None:
    """Return the published model whose shipped configuration ``model`` shares, for example a quantised copy."""
    return PUBLISHED.get(find_config(model).stem)
