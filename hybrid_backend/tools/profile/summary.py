"""Decisions of a profile from the measurements: exact layers, layers that select by their own query, intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hybrid_backend.config import HybridConfig
from hybrid_backend.tools.profile.measure import Measures

INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Decode steps between recalls that are tried."""
LITTLE = 0.1
"""Share of ``max_kl`` below which a remaining KL needs no explanation."""
PREDICTION_FACTOR = 1.5
"""Largest factor by which predicted queries may raise the KL of true ones."""
_AT_ONCE = 4
"""Sets of layers that a probe is measured with before the next probe is."""

KL = Mapping[str, float]
"""KL to dense in nats per token, by kind of probe."""


@dataclass(frozen=True)
class KLSearch:
    """Search for the fewest layers to remove from a set, such that approximating the remaining layers has a low KL.

    Attributes:
        alone: ``[kind of probe][layer]`` KL with only this layer approximated.
        together: KL of the set after 0, 1, 2, ... layers are removed; layers with the largest ``alone`` are removed
            first. The last entry is the result.
    """

    alone: Mapping[str, Mapping[int, float]]
    together: Sequence[KL] = ()

    @property
    def ranking(self) -> list[int]:
        """Layers by their largest KL in any kind of probe, the largest first."""
        layers = next(iter(self.alone.values()), {})
        return sorted(layers, key=lambda layer: (-max(kl[layer] for kl in self.alone.values()), layer))

    @property
    def chosen(self) -> list[int]:
        """Layers that the search removed from the set of sparse layers."""
        return sorted(self.ranking[: max(0, len(self.together) - 1)])

    def complete(
        self,
        rule: Callable[[Sequence[KL]], int | None],
        measure: Callable[[list[tuple[int, ...]]], Mapping[str, Sequence[float]]],
    ) -> KLSearch:
        """Remove one layer at a time and measure, until ``rule`` returns a count; otherwise remove all layers.

        Args:
            rule: returns from ``together`` how many layers are removed, None if more sets must be measured.
            measure: returns by kind of probe the KL of sets of layers.
        """
        ranking, together = self.ranking, list(self.together)
        while (count := rule(together)) is None and len(together) <= len(ranking):
            first = len(together)
            counts = range(first, min(first + _AT_ONCE, len(ranking) + 1))
            kl = measure([tuple(sorted(ranking[count:])) for count in counts])
            together += [dict(zip(kl, values, strict=True)) for values in zip(*kl.values(), strict=True)]
        return replace(self, together=together[: 1 + (len(ranking) if count is None else count)])


def exact_count(together: Sequence[KL], max_kl: float, outliers: bool) -> int | None:
    """Return how many layers are exact: the KL of the others is at most ``max_kl``.

    With ``outliers`` the next layer of the ranking is exact, too, if that more than halves the remaining KL of texts or
    of lookups. The result is None if more sets of layers must be measured.
    """
    for count, left in enumerate(together):
        if max(left.values(), default=0.0) > max_kl:
            continue
        notable = {kind: kl for kind, kl in left.items() if kl > LITTLE * max_kl} if outliers else {}
        if not notable:
            return count
        if count + 1 == len(together):
            return None
        if all(2 * together[count + 1][kind] >= kl for kind, kl in notable.items()):
            return count
    return None


def own_count(together: Sequence[KL], true: KL, max_kl: float) -> int | None:
    """Return how many layers select by their own query, because predicted queries cost too much.

    The cosine of both queries does not show it: one layer of Qwen2.5-Coder-0.5B with a cosine of 0.97 has more KL than
    all others together, one with 0.76 has none (docs/lab/profile.md).

    ``together`` is the KL of all sparse layers by predicted queries, with one layer more by its own query at a time;
    ``true`` is their KL by true queries.
    """
    most = {kind: max(PREDICTION_FACTOR * kl, LITTLE * max_kl) for kind, kl in true.items()}
    return next((n for n, left in enumerate(together) if all(kl <= most[kind] for kind, kl in left.items())), None)


def longest_interval(ratios: Sequence[Mapping[int, float]], tau: float) -> tuple[int, bool]:
    """Return the longest interval whose mean CPU ratio stays below ``tau`` (ScoutAttention, section 3.4), and True.

    It must stay below on every window: what holds for the mean of texts need not hold for the next text. If none does,
    the one with the lowest ratio on its worst window is returned, and False.
    """
    worst = {interval: max(window[interval] for window in ratios) for interval in ratios[0]}
    below = [interval for interval, ratio in worst.items() if ratio < tau]
    if below:
        return max(below), True
    lowest = min(worst.values())
    return max(interval for interval, ratio in worst.items() if ratio == lowest), False


@dataclass(frozen=True)
class LayerSummary:
    """Decisions about a full-attention layer, and the means over windows that they follow from.

    ``is_predicted``: the predicted query selects. ``kl``: of this layer alone. ``below``: ``interval`` keeps the CPU
    ratio below tau on every window. ``ratio``: the mean CPU ratio at ``interval``.
    """

    layer: int
    cosine: float | None
    is_predicted: bool
    mass: float
    kl: KL
    is_exact: bool
    interval: int
    below: bool
    ratio: float

    @property
    def skips(self) -> bool:
        """Tell whether this sparse layer selects by its own query although a lookahead predicts queries."""
        return not self.is_exact and self.cosine is not None and not self.is_predicted


def summarise(windows: Measures, min_cosine: float, tau: float, exact: KLSearch) -> list[LayerSummary]:
    """Summarise the measurements of each layer."""
    summaries = []
    for measures in zip(*windows, strict=True):
        index, ratios = measures[0].layer, [measure.ratios for measure in measures]
        interval, below = longest_interval(ratios, tau)
        cosines = [measure.cosine for measure in measures if measure.cosine is not None]
        cosine = fmean(cosines) if cosines else None
        summaries.append(
            LayerSummary(
                layer=index,
                cosine=cosine,
                is_predicted=cosine is not None and cosine >= min_cosine,
                mass=fmean(measure.mass for measure in measures),
                kl={kind: by_layer[index] for kind, by_layer in exact.alone.items()},
                is_exact=index in exact.chosen,
                interval=interval,
                below=below,
                ratio=fmean(window[interval] for window in ratios),
            )
        )
    return summaries


def covered_mass(windows: Measures, sparse: Collection[int]) -> float:
    """Return the mean attention mass that the sparse layers cover in the window where it is least, in four digits."""
    if not sparse:
        return 1.0
    least = min(fmean(m.mass for m in layers if m.layer in sparse) for layers in windows)
    return math.floor(1e4 * least) / 1e4


def chosen_intervals(layers: Sequence[LayerSummary], count: int, config: HybridConfig) -> tuple[int, ...]:
    """Return the interval of each of ``count`` layers. Layers with a sliding window keep the configured one, unused."""
    configured = config.recall.intervals
    by_layer = {summary.layer: summary.interval for summary in layers}
    everywhere = (configured,) * count if isinstance(configured, int) else configured
    return tuple(by_layer.get(layer, everywhere[layer]) for layer in range(count))
