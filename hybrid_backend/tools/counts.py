"""Format of counts in messages, such as "1 layer" and "2 layers"."""

from __future__ import annotations


def counted(count: float, noun: str) -> str:
    """Write "1 request" or "3,000 requests"; ``noun`` is the singular of a noun whose plural ends in s."""
    return f"{count:,.0f} {noun}{'' if round(count) == 1 else 's'}"
