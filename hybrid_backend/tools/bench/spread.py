"""How tables say what several runs measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], digits: int) -> str:
    """The median, with least..most in brackets where there are several; empty where there is none."""
    if not values:
        return ""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}..{max(values):.{digits}f})"
