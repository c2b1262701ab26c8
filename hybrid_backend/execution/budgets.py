"""Budgets of a step, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig


class LayerBudgets:
    """What each of some layers attends of a row that leaves pages out: the row's budget times the layer's factor.

    Args:
        config: for the pages that are always attended.
        factors: one per layer.
        most: pages that a layer can attend of a row that leaves any out; None: as many as there are.
    """

    def __init__(self, config: HybridConfig, factors: Sequence[float], most: int | None = None) -> None:
        self._factors = torch.tensor(factors, dtype=torch.float64)[:, None]
        self._least, self._most = config.sinks + config.recent + 1, most

    def of_rows(self, budgets: Tensor, num_pages: Tensor) -> Tensor:
        """``[layers, rows]`` int64 pages. ``budgets``: ``[rows]`` pages; all of a row's where it leaves none out."""
        pages = (self._factors * budgets).round().long().clamp(self._least, self._most)
        return torch.where(budgets < num_pages, pages.minimum(num_pages), num_pages)
