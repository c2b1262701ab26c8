"""A promise instead of a budget: the sampled attention mass stays above ``quality.min_mass``, and the budget follows.

Layers are sampled in turn (`metrics.sample_interval`). Whenever each of them was, once on average, the mean of the
samples is compared with the promise: what is missing makes the budget larger, what is more than kept makes it smaller.
Where the largest budget does not keep it, every row attends all of its pages for a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows
from hybrid_backend.config import HybridConfig
from hybrid_backend.observe.stats import Stats

_FASTEST = 2.0  # a budget at most doubles at once
_SLOWEST = 1.1
_SHRINK = 0.9
_SPARE = 0.5  # of the mass that may be lost: a budget with less loss than this share of it gives pages back
_DENSE_ROUNDS = 4  # rounds of samples that a dense spell would have taken


class QualityWatch:
    """The budget of rows that leave pages out, in pages; the host's own numbers, so that no device is waited for."""

    def __init__(self, config: HybridConfig, stats: Stats, layers: Sequence[int], most: int) -> None:
        """
        Args:
            layers: that are sampled, at least one.
            most: pages that a budget may grow to.
        """
        self.min_mass, self._stats, self._layers = config.quality.promise, stats, tuple(layers)
        max_kl = config.quality.max_kl
        self._max_kl = None if isinstance(max_kl, str) else max_kl
        self._page, self._most = config.page_size, most
        self._least = config.sinks + config.recent + 1
        self.budget = min(max(config.budget_pages, self._least), most)
        self.mass = math.nan  # of the last round
        self._spell = _DENSE_ROUNDS * config.metrics.sample_interval  # steps
        self._dense_steps = 0  # that are left of it
        self._unsampled = 0  # steps in a row in which the budget was all that the rows under pressure have
        self._seen = self._totals()

    @property
    def is_dense(self) -> bool:
        return self._dense_steps > 0

    def budgets(self, budgets: Tensor, rows: DecodeRows) -> Tensor:
        """The budgets of a step that begins: those of rows under pressure are the watch's, but where a request has its
        own.

        Args:
            budgets: ``[rows]`` int64 pages as the method has them.
        """
        self._follow()
        followed = (budgets < rows.num_pages) & ~rows.has_own_budget
        self._try_less(rows.num_pages[followed])
        wanted = rows.num_pages if self.is_dense else rows.num_pages.clamp(max=self.budget)
        return torch.where(followed, wanted, budgets)

    def gauges(self) -> dict[str, float]:
        """`math.nan`: nothing was sampled yet."""
        profiled = {} if self._max_kl is None else {"hybrid_quality_max_kl": self._max_kl}
        return {
            **profiled,
            "hybrid_quality_min_mass": self.min_mass,
            "hybrid_quality_mass": self.mass,
            "hybrid_quality_budget_tokens": math.inf if self.is_dense else self.budget * self._page,
        }

    def _follow(self) -> None:
        if self._dense_steps:
            self._dense_steps -= 1
            return
        total, samples = self._totals()
        count = samples - self._seen[1]
        if count < len(self._layers):
            return
        self.mass = (total - self._seen[0]) / count
        self._seen = total, samples
        lost, allowed = 1 - self.mass, 1 - self.min_mass
        if lost > allowed + 1e-9:
            if self.budget >= self._most:
                self._dense_steps = self._spell
                return
            grown = self.budget * min(max(lost / allowed if allowed else _FASTEST, _SLOWEST), _FASTEST)
            self.budget = min(math.ceil(grown), self._most)
        elif lost < _SPARE * allowed:
            self.budget = max(math.floor(self.budget * _SHRINK), self._least)

    def _try_less(self, pages: Tensor) -> None:
        """Rows that attend all of their pages are not sampled, so nothing would ever lower the budget: after as long
        as a dense spell, less is tried than the longest of them has. ``pages``: of the rows under pressure."""
        if not len(pages) or self.is_dense:
            return
        most = int(pages.max())
        self._unsampled = self._unsampled + 1 if most <= self.budget else 0
        if self._unsampled > self._spell:
            self.budget, self._unsampled = max(math.floor(most * _SHRINK), self._least), 0

    def _totals(self) -> tuple[float, int]:
        entries = [self._stats.layers[layer] for layer in self._layers]
        return sum(entry.mass_sum for entry in entries), sum(entry.mass_samples for entry in entries)


def watch(config: HybridConfig, stats: Stats, layers: Sequence[int], most: int) -> QualityWatch | None:
    """None: nothing is promised, or nothing is left out."""
    return QualityWatch(config, stats, layers, most) if config.quality.promise and layers else None
