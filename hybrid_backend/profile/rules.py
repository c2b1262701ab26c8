"""From measurements to configuration: which layers stay exact, and how often each layer recalls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Decode steps between recalls that are tried."""


@dataclass(frozen=True)
class Thresholds:
    """A layer is exact if one of these is not reached.

    ``cosine``: of predicted and true query, mean over heads and positions (ScoutAttention, Table 1, reports it).
    ``mass``: share of the attention mass on the selected pages, mean over heads and positions; chosen by the query that
    the backend would choose by.
    """

    cosine: float = 0.9
    mass: float = 0.85


def why_exact(cosine: float | None, mass: float, limits: Thresholds) -> tuple[str, ...]:
    """Which thresholds a layer misses: "cosine", "mass", both or none. ``cosine``: None where nothing is predicted."""
    reasons = []
    if cosine is not None and cosine < limits.cosine:
        reasons.append("cosine")
    if mass < limits.mass:
        reasons.append("mass")
    return tuple(reasons)


def longest_interval(ratios: Sequence[Mapping[int, float]], tau: float) -> tuple[int, bool]:
    """The longest interval whose mean CPU ratio stays below ``tau`` (ScoutAttention, section 3.4).

    Args:
        ratios: per measured window: interval -> mean CPU ratio over its steps. An interval counts only if it stays
            below on every window: what holds for the mean of texts need not hold for the next text.
        tau: ``recall.threshold``.

    Returns:
        The interval, and whether it stays below. If none does, the one with the lowest ratio on its worst window.
    """
    worst = {interval: max(window[interval] for window in ratios) for interval in ratios[0]}
    below = [interval for interval, ratio in worst.items() if ratio < tau]
    if below:
        return max(below), True
    lowest = min(worst.values())
    return max(interval for interval, ratio in worst.items() if ratio == lowest), False
