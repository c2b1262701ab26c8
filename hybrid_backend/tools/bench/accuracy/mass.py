"""Attention-mass recall of single answers, from a metric that is a mean since the server's start."""

from __future__ import annotations

import asyncio
import time

from hybrid_backend.tools.bench.client import post
from hybrid_backend.tools.bench.servers import Server
from hybrid_backend.tools.status.reading import read
from hybrid_backend.tools.status.source import from_server, metrics_url

_PUBLISH_SECONDS = 0.6  # A worker publishes its metrics at most every half second.


class MassMeter:
    """Attention mass of the answers of one server, which must answer one request at a time.

    With ``metrics.sample_interval: 1`` each decode step of a sparse context is one sample per layer. So the mean before
    and after an answer give the mean of the answer's own steps.
    """

    def __init__(self, server: Server, exact_layers: set[int]) -> None:
        """Measure ``server``, without the layers that attend everything."""
        self._server, self._exact_layers = server, exact_layers
        self._metrics = from_server(metrics_url(server.url))
        self._mean, self._steps = 0.0, 0

    def since_last(self, steps: int) -> float | None:
        """Return the mean over sparse layers, heads and the last ``steps`` decode steps; None if none was sampled."""
        if not steps:
            return None
        time.sleep(_PUBLISH_SECONDS)
        # The worker publishes after a step, so one more step is needed.
        post(self._server.url, "/v1/completions", {"model": self._server.model, "prompt": "One more.", "max_tokens": 1})
        layers = enumerate(read(asyncio.run(self._metrics()), time.time()).layers)
        masses = [layer.mass_recall for index, layer in layers if index not in self._exact_layers]
        sampled = [mass for mass in masses if mass is not None]
        mean = sum(sampled) / len(sampled) if sampled else self._mean
        if mean == self._mean:
            return None
        total = self._steps + steps
        mass = (mean * total - self._mean * self._steps) / steps
        self._mean, self._steps = mean, total
        return mass
