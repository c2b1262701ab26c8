"""Budgets of a step, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig

_ROUNDS = 4
"""In which what a layer cannot take, or must have, is shared out among the others: each leaves a little of it."""


def layer_factors(config: HybridConfig, layers: Iterable[int]) -> dict[int, float]:
    """Return ``budget_factors`` of the selecting ``layers``, scaled to a mean of 1; empty if all layers are alike."""
    selecting = list(layers)
    if not config.budget_factors or not selecting or config.sparse == "never":
        return {}
    mean = fmean(config.budget_factors[layer] for layer in selecting)
    return {layer: config.budget_factors[layer] / mean for layer in selecting}


class LayerBudgets:
    """What layers attend of a row that leaves pages out: the row's budget in the mean over those that select.

    Args:
        config: for the pages that are always attended.
        factors: of those that select, in the mean 1 (`layer_factors`).
        layers: in the order of `of_rows`.
        most: pages that each layer can attend of a row that leaves any out; None: as many as there are.
    """

    def __init__(
        self,
        config: HybridConfig,
        factors: Mapping[int, float],
        layers: Sequence[int],
        most: Sequence[int] | None = None,
    ) -> None:
        in_order = [factors.get(layer, 1.0) for layer in layers]
        self._factors = torch.tensor(in_order, dtype=torch.float64)[:, None]
        self._selects = torch.tensor([layer in factors for layer in layers])
        self._least = config.sinks + config.recent + 1
        self._most = None if most is None else torch.tensor(most)[:, None]
        self._known = torch.empty(0, 0), torch.empty(0, 0)

    def of_rows(self, budgets: Tensor, num_pages: Tensor) -> Tensor:
        """``[layers, rows]`` int64 pages. ``budgets``: ``[rows]`` pages; all of a row's where it leaves none out."""
        given = torch.stack([budgets, num_pages])
        if not torch.equal(given, self._known[0]):  # most steps begin no page, and rows are those of the step before
            self._known = given, self._of_rows(budgets, num_pages)
        return self._known[1]

    def _of_rows(self, budgets: Tensor, num_pages: Tensor) -> Tensor:
        leaves_out = budgets < num_pages
        wanted = self._factors * budgets
        limit = num_pages.expand_as(wanted)
        if self._most is not None:
            limit = limit.minimum(self._most)
        pages = wanted.clamp(self._least).minimum(limit)
        is_clipped = bool(((pages != wanted) & leaves_out).any())
        for _ in range(_ROUNDS if is_clipped else 0):
            mine = pages[self._selects]
            free = (mine > self._least) & (mine < limit[self._selects])
            missing = budgets * len(mine) - mine.sum(0)
            wanted = wanted * (1 + missing / (mine * free).sum(0).clamp(min=1))
            pages = wanted.clamp(self._least).minimum(limit)
        return torch.where(leaves_out, pages.round().long(), num_pages)
