"""What an answer must keep to be a good one: limits in milliseconds by the name of a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hybrid_backend.errors import ConfigError


def parse_limits(option: str, text: str, names: Sequence[str]) -> dict[str, float]:
    """``ttft:2000,tpot:100``.

    Raises:
        ConfigError: something else; names ``option``, what was given and what may be.
    """
    found = {}
    for item in text.split(","):
        name, _, limit = (part.strip() for part in item.partition(":"))
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = math.nan
        if name not in names or name in found or not 0 < milliseconds < math.inf:
            form = ",".join(f"{each}:MILLISECONDS" for each in names)
            raise ConfigError(f"{option} {item}: write {form}, each once or not at all")
        found[name] = milliseconds
    return found


def told(limits: Mapping[str, float]) -> str:
    """``ttft 2000 ms, tpot 100 ms``."""
    return ", ".join(f"{name} {limit:g} ms" for name, limit in limits.items())
