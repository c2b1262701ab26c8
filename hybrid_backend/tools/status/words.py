"""Texts of numbers on the status page."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.filesize import decimal

UNKNOWN = "–"


def number(value: float | None, digits: int = 0) -> str:
    """Write ``value`` with commas between thousands."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """Write a number per second, with one digit after the point below 100."""
    return number(value, 1 if value and abs(value) < 100 else 0)


def percent(share: float | None) -> str:
    """Write a share of 0..1 as a percentage."""
    return UNKNOWN if share is None else f"{number(100 * share, 1)} %"


def millis(share: float | None) -> str:
    """Write a share of time in milliseconds per second."""
    return UNKNOWN if share is None else number(1000 * share, 2 if 0 < share < 0.01 else 0)


def duration(seconds: float | None) -> str:
    """Write a duration in milliseconds below one second, else in seconds."""
    if seconds is None:
        return UNKNOWN
    return f"{1000 * seconds:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def age(seconds: float) -> str:
    """Write the age of a reading in one unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def size(value: float | None) -> str:
    """Write a number of bytes in decimal units."""
    return UNKNOWN if value is None else decimal(int(value))


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
