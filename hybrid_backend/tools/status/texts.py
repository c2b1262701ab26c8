"""Numbers and verdicts of the status page as texts."""

from __future__ import annotations

import math
from collections.abc import Iterable


def rate(value: float | None) -> str:
    """Write a number per second, with one digit after the point below 100."""
    return f"{value or 0:,.{1 if value and abs(value) < 100 else 0}f}"


def duration(seconds: float) -> str:
    """Write a latency in milliseconds or seconds."""
    return f"{1000 * seconds:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def age(seconds: float) -> str:
    """Write the time since a reading."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def mass(share: float) -> str:
    """Write an attention mass, rounded down, so that 0.99996 is not shown as 100 %."""
    return f"{math.floor(round(1e4 * share, 6)) / 100:g}%"


def lowered(text: str) -> str:
    """Return ``text`` for the middle of a sentence: names in capitals stay as they are."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that were measured; None if no value was."""
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None
