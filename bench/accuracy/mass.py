"""Attention-mass recall of single answers, from a metric that is a mean since the server's start."""

from __future__ import annotations

import time

from tests.engines.server import Server

_METRIC = "hybrid_attention_mass_recall"
_PUBLISHED = 0.6  # seconds; the worker publishes at most every half second


class MassMeter:
    """With ``metrics.sample_interval: 1`` every decode step of a sparse context is one sample per layer, so a new mean
    and a known number of steps give the mean of these steps alone."""

    def __init__(self, server: Server, exact_layers: set[int]) -> None:
        self._server, self._exact = server, exact_layers
        self._mean, self._steps = 0.0, 0

    def since_last(self, steps: int) -> float | None:
        """Mean over sparse layers, heads and the last ``steps`` decode steps; None if nothing was sampled."""
        if not steps:
            return None
        time.sleep(_PUBLISHED)
        self._server.complete("One more.", 1)  # a step, after which the worker publishes
        values = self._server.metrics(_METRIC).get(_METRIC, {})
        sparse = [value for layer, value in values.items() if layer and int(layer) not in self._exact]
        if not sparse:
            return None
        mean = sum(sparse) / len(sparse)
        if mean == self._mean:
            return None
        total = self._steps + steps
        fresh = (mean * total - self._mean * self._steps) / steps
        self._mean, self._steps = mean, total
        return fresh
