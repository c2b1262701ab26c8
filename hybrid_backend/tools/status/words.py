"""Numbers as the page writes them."""

from __future__ import annotations

import math
from collections.abc import Iterable

UNKNOWN = "–"


def number(value: float | None, digits: int = 0) -> str:
    """Write ``value`` with commas between thousands."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """Write a number per second: one digit after the point below 100."""
    return number(value, 1 if value and abs(value) < 100 else 0)


def percent(share: float | None) -> str:
    """Write a share of 0..1 as a percentage."""
    return UNKNOWN if share is None else f"{number(100 * share, 1)} %"


def duration(seconds: float | None) -> str:
    """Write a duration in milliseconds below one second, else in seconds."""
    if seconds is None:
        return UNKNOWN
    return f"{1000 * seconds:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def age(seconds: float) -> str:
    """Write how long ago something was, in one unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def bytes_text(value: float | None) -> str:
    """Write a number of bytes in decimal units."""
    if value is None:
        return UNKNOWN
    power = 0
    while value >= 1000 and power < 4:
        value, power = value / 1000, power + 1
    return f"{number(value, 1 if power and value < 100 else 0)} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def bandwidth(bytes_per_second: float) -> str:
    """Write a memory's speed in GB/s."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def mass(share: float) -> str:
    """Write an attention mass, rounded down, so that 0.99996 is not shown as 100 %."""
    return f"{math.floor(round(1e4 * share, 6)) / 100:g}%"


def lowered(text: str) -> str:
    """Return ``text`` for the middle of a sentence: names in capitals stay."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that were measured; None if no value was."""
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None
