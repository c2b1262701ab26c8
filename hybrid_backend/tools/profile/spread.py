"""Budgets per layer: the same tokens in all, handed out by what they save in answers.

How much attention mass a layer would gain does not tell, as in `divergence`: what counts is how far a layer's own KL
falls. It is measured at three budgets and taken for a power of the budget between them; and layers are looked at one by
one, as if their KLs added up. So what is found is tried, all layers together, before it is taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.step.budgets import LayerBudgets
from hybrid_backend.step.method import factors_of as method_factors
from hybrid_backend.tools.profile.options import method_of

Sizes = tuple[int, int, int]
"""Budgets that a layer is measured at, rising: the least that it may get, what all have in the mean, and the most."""
Tried = Mapping[str, Mapping[int, tuple[float, float, float]]]
"""``[kind of probe][layer]``: KL with this layer alone sparse, in nats per token, at each of `Sizes`."""

GAIN = 0.02
"""Share of the KL of a kind of probe by which it must fall."""
_NOTHING = 1e-7
"""Nats per token that are as good as none: fp32 says no more."""
_DIGITS = 12
"""Decimal places of shares of the KL. Shares that differ by less are alike."""


@dataclass(frozen=True)
class Spread:
    """Measurements of budgets per layer.

    ``sizes``: tokens. ``alone``: of each sparse layer. ``tokens``: what each of them gets. ``factors``: one per layer
    of the model, 1 for those that do not select. ``even``, ``spread``: by kind of probe, KL of all sparse layers
    together in nats per token, all alike and with ``tokens``.
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
        pairs = [(self.even[kind], self.spread[kind]) for kind in self.even]
        return all(spread_kl <= even_kl + _NOTHING for even_kl, spread_kl in pairs) and any(
            spread_kl <= (1 - GAIN) * even_kl - _NOTHING for even_kl, spread_kl in pairs
        )


def sizes_of(budget: int, least: int, most: int) -> Sizes | None:
    """Half of the budget, the budget and twice the budget, as far as they are between ``least`` and ``most``; all in
    pages. None where the budget has no room to both sides."""
    low, high = max(budget // 2, least), min(2 * budget, most)
    return (low, budget, high) if low < budget < high else None


def spread(alone: Tried, sizes: Sizes) -> dict[int, int]:
    """The pages of each layer, in the mean those in the middle of ``sizes``.

    From the least on, page by page to the layer whose KL falls most: each kind of probe as a share of its sum over the
    layers at the mean budget, both added up. A page counts for no more than the one before it, and of pages that count
    alike the first ones are given first: so layers that are alike get alike.

    Args:
        alone: what was measured. It counts as if it never rose with the budget.
        sizes: in pages.
    """
    low, budget, high = sizes
    total = {kind: sum(max(kl[1], _NOTHING) for kl in by_layer.values()) for kind, by_layer in alone.items()}
    layers = sorted({layer for by_layer in alone.values() for layer in by_layer})
    offers: list[tuple[float, int, int]] = []
    for layer in layers:
        falling = {kind: _falling(by_layer[layer]) for kind, by_layer in alone.items()}
        kl_shares = [
            sum(_between(kl, sizes, pages) / total[kind] for kind, kl in falling.items())
            for pages in range(low, high + 1)
        ]
        gains = accumulate((round(share - next_share, _DIGITS) for share, next_share in pairwise(kl_shares)), min)
        offers += [(-gain, pages, layer) for pages, gain in enumerate(gains)]
    taken = Counter(layer for *_, layer in sorted(offers)[: (budget - low) * len(layers)])
    return {layer: low + taken[layer] for layer in layers}


def factors_of(pages: Mapping[int, int], budget: int, layers: int) -> tuple[float, ...]:
    """`budget_factors` of a model of so many layers, two digits of each, from the pages of those that select."""
    return tuple(round(pages[layer] / budget, 2) if layer in pages else 1.0 for layer in range(layers))


def pages_of(config: HybridConfig, layers: Collection[int]) -> dict[int, int]:
    """Return the pages of a long sequence that a server attends in each of the selecting ``layers``."""
    factors, many = method_factors(method_of(config), config, layers), torch.tensor([torch.iinfo(torch.int32).max])
    budgets = LayerBudgets(config, factors, list(layers)).of_rows(torch.tensor([config.budget_pages]), many)
    return dict(zip(layers, budgets[:, 0].tolist(), strict=True))


def _falling(kl: tuple[float, float, float]) -> tuple[float, float, float]:
    low, budget, high = (max(value, _NOTHING) for value in kl)
    return low, min(low, budget), min(low, budget, high)


def _between(kl: tuple[float, float, float], sizes: Sizes, pages: int) -> float:
    """At so many pages: a straight line between two measurements, both axes logarithmic."""
    first = 0 if pages < sizes[1] else 1
    share = math.log(pages / sizes[first]) / math.log(sizes[first + 1] / sizes[first])
    return math.exp(math.log(kl[first]) + share * (math.log(kl[first + 1]) - math.log(kl[first])))
