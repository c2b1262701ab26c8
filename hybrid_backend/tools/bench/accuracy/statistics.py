"""95 % confidence intervals: Wilson's for a score, the bootstrap's for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054  # 97.5 % point of the normal distribution
_RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int


def wilson(values: Sequence[float]) -> Estimate | None:
    """Return the mean of values in [0, 1] with Wilson's score interval (Wilson 1927); None without values.

    The interval is made for values of 0 and 1. Values between have a smaller variance, so it is too wide for them.
    Unlike the bootstrap's interval it is no point where all of few values are equal.

    Raises:
        ValueError: a value is outside [0, 1].
    """
    n = len(values)
    if not n:
        return None
    if min(values) < 0 or max(values) > 1:
        raise ValueError(f"Wilson's interval needs values in [0, 1], got {list(values)}")
    mean = sum(values) / n
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * (mean * (1 - mean) / n + _Z**2 / (4 * n * n)) ** 0.5
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)), n)


def bootstrap(values: Sequence[float | None], seed: int = 0) -> Estimate | None:
    """Return the mean with the percentile bootstrap's interval (Efron 1979); None without values.

    None among the values is left out. For a paired difference give the differences.
    """
    data = np.array([value for value in values if value is not None])
    if not len(data):
        return None
    resamples = np.random.default_rng(seed).integers(len(data), size=(_RESAMPLES, len(data)))
    low, high = np.percentile(data[resamples].mean(1), [2.5, 97.5])
    mean = float(data.mean())
    # Rounding may put a constant sample's percentiles a hair beside its mean.
    return Estimate(mean, min(float(low), mean), max(float(high), mean), len(data))
