"""Budgets per layer: as many tokens in all, more of them for layers whose KL they lower most.

The attention mass that a layer would gain does not show it, as in `divergence`. The KL of a layer is measured alone at
three budgets and taken for a power of the budget between them, as if the KL of layers added up. So the result is
measured, all layers together, before it is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hybrid_backend.config import HybridConfig
from hybrid_backend.step.budgets import LayerBudgets
from hybrid_backend.step.method import factors_of as method_factors
from hybrid_backend.tools.profile.options import method_of

Sizes = tuple[int, int, int]
"""Budgets that a layer is measured at, rising: the least that it may get, the mean of all layers, and the most."""
Tried = Mapping[str, Mapping[int, Sequence[float]]]
"""``[kind of probe][layer]``: KL with this layer alone sparse, in nats per token, at each of `Sizes`."""

GAIN = 0.02
"""Share of the KL of a kind of probe by which it must fall."""
_NOTHING = 1e-7
"""Nats per token that are as good as none, given the precision of fp32."""
_DIGITS = 12
"""Decimal places of shares of the KL. Shares that differ by less are alike."""


@dataclass(frozen=True)
class Spread:
    """Measurements of budgets per layer.

    Attributes:
        sizes: budgets in tokens.
        alone: KL of each sparse layer alone.
        tokens: budget of each sparse layer.
        factors: `budget_factors`, 1 for layers that do not select.
        even: KL of all sparse layers together by kind of probe, all budgets alike.
        spread: the same with ``tokens``.
    """

    sizes: Sizes
    alone: Tried
    tokens: Mapping[int, int]
    factors: tuple[float, ...]
    even: Mapping[str, float]
    spread: Mapping[str, float]

    @property
    def helps(self) -> bool:
        """Tell whether no kind of probe gets worse, and one gets better by `GAIN`."""
        pairs = [(kl, self.spread[kind]) for kind, kl in self.even.items()]
        is_worse = any(spread > even + _NOTHING for even, spread in pairs)
        return not is_worse and any(spread <= (1 - GAIN) * even - _NOTHING for even, spread in pairs)


def sizes_of(budget: int, least: int, most: int) -> Sizes | None:
    """Return half of the budget, the budget and twice the budget, as far as they are between ``least`` and ``most``.

    All are in pages. None: the budget has no room to both sides.
    """
    low, high = max(budget // 2, least), min(2 * budget, most)
    return (low, budget, high) if low < budget < high else None


def spread(alone: Tried, sizes: Sizes) -> dict[int, int]:
    """Return the pages of each layer, whose mean is the middle one of ``sizes`` (in pages).

    From the least on, each page goes to the layer whose KL it lowers most: the KL of each kind of probe is a share of
    its sum over the layers at the mean budget, and the shares are added up. A page counts for no more than the one
    before it, and of pages that count alike the first ones are handed out first, so that
    equal layers get equal budgets.
    """
    low, budget, high = sizes
    layers = sorted({layer for by_layer in alone.values() for layer in by_layer})
    offers: list[tuple[float, int, int]] = []
    for layer in layers:
        shares = np.zeros(high + 1 - low)
        for by_layer in alone.values():
            shares += _curve(by_layer[layer], sizes) / sum(max(kl[1], _NOTHING) for kl in by_layer.values())
        gains = np.minimum.accumulate(np.round(-np.diff(shares), _DIGITS))
        offers += [(-gain, pages, layer) for pages, gain in enumerate(gains.tolist())]
    taken = Counter(layer for *_, layer in sorted(offers)[: (budget - low) * len(layers)])
    return {layer: low + taken[layer] for layer in layers}


def _curve(kl: Sequence[float], sizes: Sizes) -> NDArray[np.float64]:
    """Return the KL at each number of pages from the least to the most, never rising.

    Between two measurements the curve is a straight line, both axes logarithmic.
    """
    falling = np.minimum.accumulate(np.maximum(kl, _NOTHING))
    pages = np.arange(sizes[0], sizes[2] + 1)
    curve: NDArray[np.float64] = np.exp(np.interp(np.log(pages), np.log(sizes), np.log(falling)))
    return curve


def factors_of(pages: Mapping[int, int], budget: int, layers: int) -> tuple[float, ...]:
    """Return `budget_factors` of a model of so many layers, in two digits, from the pages of those that select."""
    return tuple(round(pages[layer] / budget, 2) if layer in pages else 1.0 for layer in range(layers))


def pages_of(config: HybridConfig, layers: Collection[int]) -> dict[int, int]:
    """Return the pages of a long sequence that a server attends in each of the selecting ``layers``."""
    factors, many = method_factors(method_of(config), config, layers), torch.tensor([torch.iinfo(torch.int32).max])
    budgets = LayerBudgets(config, factors, list(layers)).of_rows(torch.tensor([config.budget_pages]), many)
    return dict(zip(layers, budgets[:, 0].tolist(), strict=True))
