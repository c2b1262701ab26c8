"""The budget that keeps the sampled attention mass above ``quality.min_mass``, adjusted while the server runs.

The attention mass of a selection is the share of the exact attention weights that falls on the selected pages. Each
layer is sampled once in ``metrics.sample_interval`` steps. A round ends when there are as many new samples as layers.
The mean of the round is compared with ``quality.min_mass``, and the budget grows or shrinks. If even the largest budget
loses too much mass, every row attends all of its pages for some steps (a dense period).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows
from hybrid_backend.config import HybridConfig
from hybrid_backend.observe.stats import Stats

_MAX_GROWTH = 2.0
"""Largest factor by which a round may enlarge the budget."""
_MIN_GROWTH = 1.1
"""Smallest factor by which a round enlarges a budget that is too small."""
_SHRINK = 0.9
"""Factor by which a round reduces a budget that is too large."""
_SPARE = 0.5
"""A budget shrinks if it loses less than this share of the mass that it may lose."""
_DENSE_ROUNDS = 4
"""Length of a dense period, in rounds of samples."""


class QualityWatch:
    """Adjusts the page budget of rows that leave pages out. The samples are read on the host, without a device wait."""

    def __init__(self, config: HybridConfig, stats: Stats, layers: Sequence[int], max_budget: int) -> None:
        """Begin with the budget of the configuration.

        Args:
            config: the promised attention mass, the first budget, sink and recent pages.
            stats: counters that hold the samples.
            layers: layers that are sampled, at least one.
            max_budget: largest budget, in pages.
        """
        self.min_mass, self._stats, self._layers = config.quality.promise, stats, tuple(layers)
        max_kl = config.quality.max_kl
        self._max_kl = None if isinstance(max_kl, str) else max_kl
        self._page_size, self._max_budget = config.page_size, max_budget
        self._min_budget = config.sinks + config.recent + 1
        self.budget = min(max(config.budget_pages, self._min_budget), max_budget)
        """Budget in pages."""
        self.mass = math.nan
        """Mean attention mass of the last round, between 0 and 1; NaN before the first round ends."""
        self._dense_period = _DENSE_ROUNDS * config.metrics.sample_interval
        """Length of a dense period, in steps."""
        self._dense_steps = 0
        """Steps that are left of the dense period."""
        self._unsampled_steps = 0
        """Consecutive steps in which the budget covered all pages of the rows that follow it."""
        self._round_start = self._totals()

    @property
    def is_dense(self) -> bool:
        """Tell whether every row attends all of its pages, because the largest budget loses too much mass."""
        return self._dense_steps > 0

    def budgets(self, budgets: Tensor, rows: DecodeRows) -> Tensor:
        """Return the page budgets ``[rows]`` int64 of a step, given the budgets of the method.

        A row gets the adjusted budget, unless the method's budget covers all pages of the row or the request asked for
        a budget.
        """
        self._adjust()
        is_adjusted = (budgets < rows.num_pages) & ~rows.has_own_budget
        self._try_smaller(rows.num_pages[is_adjusted])
        adjusted = rows.num_pages if self.is_dense else rows.num_pages.clamp(max=self.budget)
        return torch.where(is_adjusted, adjusted, budgets)

    def gauges(self) -> dict[str, float]:
        """Return gauges by the name of a metric; the mass is NaN before the first round ends."""
        profiled = {} if self._max_kl is None else {"hybrid_quality_max_kl": self._max_kl}
        return {
            **profiled,
            "hybrid_quality_min_mass": self.min_mass,
            "hybrid_quality_mass": self.mass,
            "hybrid_quality_budget_tokens": math.inf if self.is_dense else self.budget * self._page_size,
        }

    def _adjust(self) -> None:
        """Grow or shrink the budget if a round of samples has ended."""
        if self._dense_steps:
            self._dense_steps -= 1
            return
        total, samples = self._totals()
        count = samples - self._round_start[1]
        if count < len(self._layers):
            return
        self.mass = (total - self._round_start[0]) / count
        self._round_start = total, samples
        lost, allowed = 1 - self.mass, 1 - self.min_mass
        if lost > allowed + 1e-9:
            if self.budget >= self._max_budget:
                self._dense_steps = self._dense_period
                return
            growth = min(max(lost / allowed if allowed else _MAX_GROWTH, _MIN_GROWTH), _MAX_GROWTH)
            self.budget = min(math.ceil(self.budget * growth), self._max_budget)
        elif lost < _SPARE * allowed:
            self.budget = max(math.floor(self.budget * _SHRINK), self._min_budget)

    def _try_smaller(self, pages: Tensor) -> None:
        """Shrink the budget below the longest row if the budget has covered all rows for as long as a dense period.

        Rows that attend all of their pages are not sampled, so samples alone would never shrink the budget again.
        ``pages`` counts the pages of each row with an adjusted budget.
        """
        if not len(pages) or self.is_dense:
            return
        longest = int(pages.max())
        self._unsampled_steps = self._unsampled_steps + 1 if longest <= self.budget else 0
        if self._unsampled_steps > self._dense_period:
            self.budget, self._unsampled_steps = max(math.floor(longest * _SHRINK), self._min_budget), 0

    def _totals(self) -> tuple[float, int]:
        """Return the sum and the number of all samples since start."""
        entries = [self._stats.layers[layer] for layer in self._layers]
        return sum(entry.mass_sum for entry in entries), sum(entry.mass_samples for entry in entries)


def watch(config: HybridConfig, stats: Stats, layers: Sequence[int], max_budget: int) -> QualityWatch | None:
    """Return a `QualityWatch`; None if the configuration promises no attention mass or no layer selects pages."""
    return QualityWatch(config, stats, layers, max_budget) if config.quality.promise and layers else None
