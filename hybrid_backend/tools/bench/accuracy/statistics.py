"""95 % confidence intervals: Wilson's for a score, the bootstrap's for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054  # the normal distribution's 97.5 % point
_RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int


def wilson(values: Sequence[float]) -> Estimate:
    """Mean of values in [0, 1] with Wilson's score interval (Wilson 1927).

    It is made for values of 0 and 1. Values between have a smaller variance, so the interval is then wider than needed,
    never too narrow; and unlike the bootstrap it does not shrink to nothing where all of few values are equal.

    Raises:
        ValueError: There is no value, or one outside [0, 1].
    """
    n = len(values)
    if not n or min(values) < 0 or max(values) > 1:
        raise ValueError(f"Wilson's interval needs values in [0, 1], got {list(values)}")
    mean = sum(values) / n
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * (mean * (1 - mean) / n + _Z**2 / (4 * n * n)) ** 0.5
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)), n)


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean with the percentile bootstrap's interval (Efron 1979), `_RESAMPLES` resamples; for a paired difference give
    the differences.

    Raises:
        ValueError: There is no value.
    """
    if not len(values):
        raise ValueError("the bootstrap needs at least one value")
    data = np.asarray(values, dtype=float)
    chosen = np.random.default_rng(seed).integers(len(data), size=(_RESAMPLES, len(data)))
    low, high = np.percentile(data[chosen].mean(1), [2.5, 97.5])
    mean = float(data.mean())
    # Rounding may put a constant sample's percentiles a hair beside its mean.
    return Estimate(mean, min(float(low), mean), max(float(high), mean), len(data))
