"""A /metrics as a hybrid server has it, with figures that a test chooses, written by the real publisher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybrid_backend.observe.metrics import Publisher
from hybrid_backend.observe.stats import Stats

LAYERS = 30


def _none(layer: int) -> float:
    return 0.0


def _all(layer: int) -> float:
    return 1.0


class MetricsStand:
    """Counters that only grow, as a server's do. ``text`` is its /metrics."""

    def __init__(self, layers: int = LAYERS) -> None:
        self.registry = CollectorRegistry()
        self.stats = Stats.of(layers)
        self.gauges: dict[str, float] = {
            "hybrid_host_pool_pages": 1000,
            "hybrid_frames_in_use": 240,
            "hybrid_frame_bytes": 4096,
            "hybrid_budget_tokens": 1024,
            "hybrid_frames_per_request": 35,
            "hybrid_page_tokens": 32,
            "hybrid_max_requests": 12,
        }
        self._publisher = Publisher(self.stats, lambda: self.gauges, 0, self.registry)
        labels = ["model_name", "engine"]
        self.running = Gauge("vllm:num_requests_running", "", labels, registry=self.registry).labels("demo", "0")
        self.waiting = Gauge("vllm:num_requests_waiting", "", labels, registry=self.registry).labels("demo", "0")
        self.fill = Gauge("vllm:kv_cache_usage_perc", "", labels, registry=self.registry).labels("demo", "0")
        self.tokens = Counter("vllm:generation_tokens", "", labels, registry=self.registry).labels("demo", "0")
        self.prompts = Counter("vllm:prompt_tokens", "", labels, registry=self.registry).labels("demo", "0")
        self.looked_up = Counter("vllm:prefix_cache_queries", "", labels, registry=self.registry).labels("demo", "0")
        self.hits = Counter("vllm:prefix_cache_hits", "", labels, registry=self.registry).labels("demo", "0")
        first, gap = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
        self.first_token = Histogram(first, "", labels, registry=self.registry).labels("demo", "0")
        self.token_gap = Histogram(gap, "", labels, registry=self.registry).labels("demo", "0")

    def decode(
        self, cpu: Callable[[int], float] = _none, resident: Callable[[int], float] = _all, moved: bool = True
    ) -> None:
        """One interval in which every layer attended 1000 tokens of 4000 and selected 100 pages; shares by layer.
        ``moved``: the device tier waited, and pages were recalled."""
        for index, layer in enumerate(self.stats.layers):
            self.stats.attended(index, 1000, round(1000 * cpu(index)))
            self.stats.saw_contexts([index], 4000)
            self.stats.looked_up(index, 100, round(100 * resident(index)))
            layer.wait_seconds += 0.001 * moved
            layer.recalled_pages += 2 * moved
        self.tokens.inc(100)

    def text(self) -> str:
        self._publisher.publish(force=True)
        return generate_latest(self.registry).decode()

    async def source(self) -> str:
        """Return the same text, as a source of the sampler."""
        return self.text()


class Clock:
    """Time that a test moves."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The application on a real uvicorn in a thread; its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "uvicorn did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def metrics_app(text: Callable[[], str]) -> FastAPI:
    """A server with nothing but /metrics."""
    app = FastAPI()
    app.add_api_route("/metrics", lambda: PlainTextResponse(text()), methods=["GET"])
    return app
