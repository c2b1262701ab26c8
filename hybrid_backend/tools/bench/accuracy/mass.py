"""Attention-mass recall of single answers, from a metric that is a mean since the server's start."""

from __future__ import annotations

import asyncio
import time

from hybrid_backend.tools.bench.client import post
from hybrid_backend.tools.bench.servers import Server
from hybrid_backend.tools.status.reading import read
from hybrid_backend.tools.status.source import from_server, metrics_url

_PUBLISHED = 0.6  # seconds; the worker publishes at most every half second


class MassMeter:
    """With ``metrics.sample_interval: 1`` every decode step of a sparse context is one sample per layer, so a new mean
    and a known number of steps give the mean of these steps alone."""

    def __init__(self, server: Server, exact_layers: set[int]) -> None:
        self._server, self._exact, self._metrics = server, exact_layers, from_server(metrics_url(server.url))
        self._mean, self._steps = 0.0, 0

    def since_last(self, steps: int) -> float | None:
        """Mean over sparse layers, heads and the last ``steps`` decode steps; None if nothing was sampled."""
        if not steps:
            return None
        time.sleep(_PUBLISHED)
        # A step, after which the worker publishes.
        post(self._server.url, "/v1/completions", {"model": self._server.model, "prompt": "One more.", "max_tokens": 1})
        by_layer = [layer.mass_recall for layer in read(asyncio.run(self._metrics()), time.time()).layers]
        sparse = [mass for layer, mass in enumerate(by_layer) if mass is not None and layer not in self._exact]
        if not sparse:
            return None
        mean = sum(sparse) / len(sparse)
        if mean == self._mean:
            return None
        total = self._steps + steps
        fresh = (mean * total - self._mean * self._steps) / steps
        self._mean, self._steps = mean, total
        return fresh
