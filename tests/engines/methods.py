"""Conditions in which a method promises the stock backend's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exact:
    """``alone``, ``together``: places in the engine's prompts of those asked one by one, and four at once.
    ``asks_cpu``: the CPU workers attend a part of them. ``on_device``: the method copies pages to the device tier."""

    keys: Mapping[str, Any]
    alone: Sequence[int]
    together: Sequence[int]
    asks_cpu: bool = False
    on_device: bool = True
