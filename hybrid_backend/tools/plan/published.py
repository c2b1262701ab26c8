"""Shapes of published models (`published.yaml`), so that `hybrid plan` knows them without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hybrid_backend.config import ModelMatch


class Published(NamedTuple):
    """A published model.

    Attributes:
        hub_id: its id on the hub.
        config: the keys of its config.json that decide its shape.
        match: name patterns of models that have its shape, such as quantised copies; empty: its short name anywhere.
    """

    hub_id: str
    config: Mapping[str, Any]
    match: tuple[str, ...] = ()


PUBLISHED: Mapping[str, Published] = {
    name: Published(**entry)
    for name, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
"""Published models by the short names that `hybrid plan` takes."""


def published(model: str) -> Published | None:
    """Return the published model that ``model`` names by hub id, with or without the owner, or by its short name."""
    named = model.lower()
    for name, entry in PUBLISHED.items():
        hub_id = entry.hub_id.lower()
        if named in (name, hub_id, hub_id.partition("/")[2]):
            return entry
    return None


def relative(model: str) -> Published | None:
    """Return the published model whose shape ``model`` shares by its name, for example of a quantised copy."""
    scores = {
        name: ModelMatch(match=entry.match or f"*{name}*").specificity(model) or 0 for name, entry in PUBLISHED.items()
    }
    best = max(scores, key=lambda name: scores[name])
    return PUBLISHED[best] if scores[best] else None
