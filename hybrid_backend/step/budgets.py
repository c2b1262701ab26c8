"""Page budgets per layer: a row's budget is the mean, and each selecting layer gets its own share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig

_ROUNDS = 4
"""Passes of `LayerBudgets` that hand the pages which clipped layers lose or gain to the layers that are not clipped."""


def layer_factors(config: HybridConfig, layers: Iterable[int]) -> dict[int, float]:
    """Return ``budget_factors`` of the selecting ``layers``, scaled to a mean of 1; empty if all budgets are equal."""
    selecting = list(layers)
    if not config.budget_factors or not selecting or config.sparse == "never":
        return {}
    mean = fmean(config.budget_factors[layer] for layer in selecting)
    return {layer: config.budget_factors[layer] / mean for layer in selecting}


class LayerBudgets:
    """Splits the page budget of each row among the layers.

    The mean over the selecting layers is the row's budget, as far as the limits of the layers allow.

    Args:
        config: sink and recent pages, which every layer attends.
        factors: budget of each selecting layer relative to the mean (`layer_factors`).
        layers: layers, in the order of the result of `of_rows`.
        limits: largest budget of each layer in pages; None: a layer can attend all pages of a row.
    """

    def __init__(
        self,
        config: HybridConfig,
        factors: Mapping[int, float],
        layers: Sequence[int],
        limits: Sequence[int] | None = None,
    ) -> None:
        layer_order = [factors.get(layer, 1.0) for layer in layers]
        self._factors = torch.tensor(layer_order, dtype=torch.float64)[:, None]
        self._selects = torch.tensor([layer in factors for layer in layers])
        self._least = config.sinks + config.recent + 1
        self._limits = None if limits is None else torch.tensor(limits)[:, None]
        self._last_inputs, self._last_budgets = torch.empty(0, 0), torch.empty(0, 0)

    def of_rows(self, budgets: Tensor, num_pages: Tensor) -> Tensor:
        """Return the budget of every layer and row.

        Args:
            budgets: ``[rows]`` int64 pages, the mean over the selecting layers.
            num_pages: ``[rows]`` int64 pages of each sequence.

        Returns:
            ``[layers, rows]`` int64 pages. A row whose budget covers its sequence gets all pages in every layer.
        """
        # Budgets are computed only when they change: most scheduler steps have the rows and pages of the step before.
        inputs = torch.stack([budgets, num_pages])
        if not torch.equal(inputs, self._last_inputs):
            self._last_inputs, self._last_budgets = inputs, self._split(budgets, num_pages)
        return self._last_budgets

    def _split(self, budgets: Tensor, num_pages: Tensor) -> Tensor:
        """Compute the result of `of_rows`."""
        leaves_out = budgets < num_pages
        targets = self._factors * budgets
        limit = num_pages.expand_as(targets)
        if self._limits is not None:
            limit = limit.minimum(self._limits)
        pages = targets.clamp(self._least).minimum(limit)
        is_clipped = bool(((pages != targets) & leaves_out).any())
        for _ in range(_ROUNDS if is_clipped else 0):
            selecting = pages[self._selects]
            is_free = (selecting > self._least) & (selecting < limit[self._selects])
            missing = budgets * len(selecting) - selecting.sum(0)
            targets = targets * (1 + missing / (selecting * is_free).sum(0).clamp(min=1))
            pages = targets.clamp(self._least).minimum(limit)
        return torch.where(leaves_out, pages.round().long(), num_pages)
