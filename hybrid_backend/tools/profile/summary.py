"""Decisions of a profile from the measurements of all windows: exact layers, and recall intervals of the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hybrid_backend.config import HybridConfig
from hybrid_backend.tools.profile.measure import LayerMeasure
from hybrid_backend.tools.profile.recall import NEVER

INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Decode steps between recalls that are tried."""


LITTLE = 0.1
"""Share of `Thresholds.kl` below which a remaining KL needs no explanation."""


@dataclass(frozen=True)
class Thresholds:
    """Limits by which a layer is exact, and by which its queries are predicted.

    ``cosine``: of predicted and true query, mean over heads and positions (ScoutAttention, Table 1, reports it); below,
    the layer's own query selects. ``mass``: share of the attention mass on the selected pages, mean over heads and
    positions, at least; chosen by the query that the backend would choose by; below, a layer is exact. ``kl``: nats per
    token that all sparse layers together may cost, at most, in texts' continuations and in lookups (`divergence`).
    ``outliers``: whether a layer is exact, too, that costs more than half of what is left below ``kl``.
    """

    cosine: float = 0.9
    mass: float = 0.0
    kl: float = 0.05
    outliers: bool = True


@dataclass(frozen=True)
class SparsityKL:
    """Mean KL to dense in nats per token, by kind of probe.

    ``alone``: ``[kind][layer]``, of this layer sparse, all others dense. ``together``: with so many layers exact as its
    place says, the most expensive ones by ``alone``, and all others sparse. The last one is what is chosen.
    """

    alone: Mapping[str, Mapping[int, float]]
    together: Sequence[Mapping[str, float]] = ()

    @property
    def ranking(self) -> list[int]:
        """The most expensive layer first."""
        layers = {layer for by_layer in self.alone.values() for layer in by_layer}
        return sorted(layers, key=lambda layer: (-max(kl[layer] for kl in self.alone.values()), layer))

    @property
    def exact(self) -> list[int]:
        return self.ranking[: max(0, len(self.together) - 1)]

    def exact_count(self, limits: Thresholds) -> int | None:
        """Return how many layers of the `ranking` are exact; None if ``together`` does not say so yet."""
        for count, left in enumerate(self.together):
            if any(kl > limits.kl for kl in left.values()):
                continue
            if not limits.outliers or all(kl <= LITTLE * limits.kl for kl in left.values()):
                return count
            if count + 1 == len(self.together):
                break
            after = self.together[count + 1]
            if all(2 * after[kind] >= kl for kind, kl in left.items() if kl > LITTLE * limits.kl):
                return count
        return len(self.ranking) if len(self.together) > len(self.ranking) else None

    def attended(self, context: int, budget: int) -> int:
        """Tokens of a sequence of ``context`` tokens that a decode step attends, in all layers."""
        layers = len(self.ranking)
        return len(self.exact) * context + (layers - len(self.exact)) * min(budget, context)


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


Measures = Sequence[Sequence[LayerMeasure]]
"""Per window, per full-attention layer."""


@dataclass(frozen=True)
class LayerSummary:
    """Decisions about a full-attention layer, and what they follow from.

    ``ratio``: mean CPU share at ``interval``; ``ratio_without``: without recall. ``cosine``: None where nothing is
    predicted. ``predicted``: whether it is above the threshold, and nothing else says that the layer's own query must
    select (`Ahead`). ``kl``: by kind of probe, of this layer alone. ``why``: what makes it exact, "KL" or "mass", empty
    if it is sparse. ``below``: whether ``interval`` keeps the CPU ratio below tau on every window.
    """

    layer: int
    cosine: float | None
    predicted: bool
    mass: float
    mass_true: float
    mass_best: float
    kl: dict[str, float]
    why: tuple[str, ...]
    interval: int
    below: bool
    ratio: float
    ratio_without: float
    tokens90: float
    tokens95: float

    @property
    def skips(self) -> bool:
        """Tell whether this sparse layer selects by its own query although a lookahead predicts queries."""
        return not self.why and self.cosine is not None and not self.predicted


def summarise(
    windows: Measures, limits: Thresholds, tau: float, frames: int, sparsity_kl: SparsityKL
) -> list[LayerSummary]:
    """Means over windows; intervals by the rule of `longest_interval`, with so many frames."""
    summaries, exact = [], set(sparsity_kl.exact)
    for layers in zip(*windows, strict=True):
        tried = [{i: ratio for i, ratio in m.ratios[frames].items() if i != NEVER} for m in layers]
        interval, below = longest_interval(tried, tau)
        cosine, mass = _mean([m.cosine for m in layers]), fmean(m.mass for m in layers)
        kl = {kind: by_layer[layers[0].layer] for kind, by_layer in sparsity_kl.alone.items()}
        by_kl, by_mass = layers[0].layer in exact, mass < limits.mass
        summaries.append(
            LayerSummary(
                layer=layers[0].layer,
                cosine=cosine,
                predicted=cosine is not None and cosine >= limits.cosine,
                mass=mass,
                mass_true=fmean(m.mass_true for m in layers),
                mass_best=fmean(m.mass_best for m in layers),
                kl=kl,
                why=("KL",) * by_kl + ("mass",) * by_mass,
                interval=interval,
                below=below,
                ratio=fmean(m.ratios[frames][interval] for m in layers),
                ratio_without=fmean(m.ratios[frames][NEVER] for m in layers),
                tokens90=fmean(x for m in layers for x in m.tokens90),
                tokens95=fmean(x for m in layers for x in m.tokens95),
            )
        )
    return summaries


@dataclass(frozen=True)
class Check:
    """A sparse layer on text that nothing was chosen by, with the interval that was chosen."""

    layer: int
    cosine: float | None
    mass: float
    interval: int
    profiled: float
    ratio: float
    holds: bool


def fewest_frames(windows: Measures, limits: Thresholds, tau: float, sparsity_kl: SparsityKL) -> int | None:
    """The fewest simulated frames with which every sparse layer has an interval that stays below tau; None if none."""
    tried = set.intersection(*(set(layer.ratios) for window in windows for layer in window))
    for frames in sorted(tried):
        if all(layer.below or layer.why for layer in summarise(windows, limits, tau, frames, sparsity_kl)):
            return frames
    return None


def check(windows: Measures, chosen: Sequence[LayerSummary], tau: float, frames: int) -> list[Check]:
    """The chosen intervals on other windows, sparse layers only."""
    by_layer = {layers[0].layer: layers for layers in zip(*windows, strict=True)}
    results = []
    for summary in chosen:
        if summary.why:
            continue
        layers = by_layer[summary.layer]
        ratio = fmean(m.ratios[frames][summary.interval] for m in layers)
        cosine, mass = _mean([m.cosine for m in layers]), fmean(m.mass for m in layers)
        results.append(Check(summary.layer, cosine, mass, summary.interval, summary.ratio, ratio, ratio < tau))
    return results


def kept_mass(windows: Measures, sparse: Collection[int]) -> float:
    """Attention mass that the ``sparse`` layers cover, their mean, in the window where it is least; four digits of
    it."""
    if not sparse:
        return 1.0
    least = min(fmean(m.mass for m in layers if m.layer in sparse) for layers in windows)
    return math.floor(1e4 * least) / 1e4


def chosen_intervals(chosen: Sequence[LayerSummary], layers: int, config: HybridConfig) -> tuple[int, ...]:
    """Return an interval per layer of the model. Layers with a sliding window keep the configuration's, unused."""
    by_layer = {summary.layer: summary.interval for summary in chosen}
    configured = config.recall.intervals
    return tuple(
        by_layer.get(layer, configured if isinstance(configured, int) else configured[layer]) for layer in range(layers)
    )


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None
