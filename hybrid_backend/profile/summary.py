"""What a profile decides: measurements of all windows, brought together per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hybrid_backend.config import HybridConfig
from hybrid_backend.profile.measure import LayerMeasure
from hybrid_backend.profile.recall import NEVER
from hybrid_backend.profile.rules import Thresholds, longest_interval, why_exact

Measures = Sequence[Sequence[LayerMeasure]]
"""Per window, per full-attention layer."""


@dataclass(frozen=True)
class LayerSummary:
    """One full-attention layer. ``ratio``: mean CPU share at ``interval``; ``ratio_without``: without recall.

    ``why``: the thresholds that make it exact, empty if it is sparse. ``below``: whether ``interval`` keeps the CPU
    ratio below tau on every window.
    """

    layer: int
    cosine: float | None
    mass: float
    mass_true: float
    mass_best: float
    why: tuple[str, ...]
    interval: int
    below: bool
    ratio: float
    ratio_without: float
    tokens90: float
    tokens95: float


def summarise(windows: Measures, limits: Thresholds, tau: float, slots: int) -> list[LayerSummary]:
    """Means over windows; intervals by the rule of `longest_interval`, with so many slots."""
    found = []
    for layers in zip(*windows, strict=True):
        tried = [{i: ratio for i, ratio in m.ratios[slots].items() if i != NEVER} for m in layers]
        interval, below = longest_interval(tried, tau)
        cosine, mass = _mean([m.cosine for m in layers]), fmean(m.mass for m in layers)
        found.append(
            LayerSummary(
                layer=layers[0].layer,
                cosine=cosine,
                mass=mass,
                mass_true=fmean(m.mass_true for m in layers),
                mass_best=fmean(m.mass_best for m in layers),
                why=why_exact(cosine, mass, limits),
                interval=interval,
                below=below,
                ratio=fmean(m.ratios[slots][interval] for m in layers),
                ratio_without=fmean(m.ratios[slots][NEVER] for m in layers),
                tokens90=fmean(x for m in layers for x in m.tokens90),
                tokens95=fmean(x for m in layers for x in m.tokens95),
            )
        )
    return found


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


def fewest_slots(windows: Measures, limits: Thresholds, tau: float) -> int | None:
    """The fewest simulated slots with which every sparse layer has an interval that stays below tau; None if none."""
    tried = set.intersection(*(set(layer.ratios) for window in windows for layer in window))
    for slots in sorted(tried):
        if all(layer.below or layer.why for layer in summarise(windows, limits, tau, slots)):
            return slots
    return None


def check(windows: Measures, chosen: Sequence[LayerSummary], tau: float, slots: int) -> list[Check]:
    """The chosen intervals on other windows, sparse layers only."""
    by_layer = {layers[0].layer: layers for layers in zip(*windows, strict=True)}
    results = []
    for summary in chosen:
        if summary.why:
            continue
        layers = by_layer[summary.layer]
        ratio = fmean(m.ratios[slots][summary.interval] for m in layers)
        cosine, mass = _mean([m.cosine for m in layers]), fmean(m.mass for m in layers)
        results.append(Check(summary.layer, cosine, mass, summary.interval, summary.ratio, ratio, ratio < tau))
    return results


def chosen_intervals(chosen: Sequence[LayerSummary], layers: int, config: HybridConfig) -> tuple[int, ...]:
    """One interval per layer of the model; layers with a sliding window never recall and keep the configuration's."""
    by_layer = {summary.layer: summary.interval for summary in chosen}
    given = config.recall.intervals
    return tuple(by_layer.get(layer, given if isinstance(given, int) else given[layer]) for layer in range(layers))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
