"""Prometheus metrics of one rank, published on the engine's /metrics. `observe.stats` says what each metric means.

A figure that was not counted or sampled yet has no sample, and neither has a figure that a decode path cannot know.

The engine's worker and its API server are different processes. prometheus_client joins their metrics through a
directory (``PROMETHEUS_MULTIPROC_DIR``), which `hybrid serve` creates and removes. Without that variable the metrics
stay in the worker's own registry.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge

from hybrid_backend.observe.stats import LayerStats, Stats

_COUNTERS = {
    "selected_tokens": "Tokens attended by decoding rows",
    "context_tokens": "Tokens in the contexts of decoding rows",
    "cpu_tokens": "Tokens attended by the CPU workers",
    "recalled_pages": "Pages recalled into frames",
    "resident_hits": "Selected pages that the device tier held",
    "resident_lookups": "Selected pages, resident or not",
    "head_lookups": "KV heads whose cached pages were looked up (clo)",
    "head_hits": "KV heads that kept their cached pages (clo)",
    "loaded_head_pages": "Pages of one KV head copied to the device tier where its cache missed (clo)",
    "wait_seconds": "Seconds that the device tier stood still for CPU partials",
    "attention_seconds": "Seconds that decoding rows' attention took, where the CPU attends in place",
    "lead_seconds": "Seconds by which CPU partials were asked for before they were needed",
    "mass_samples": "Samples that hybrid_attention_mass_recall is the mean of",
}
"""Attributes of `LayerStats` that are published as counters ``hybrid_{name}_total``, with their help texts."""
_LAYER_GAUGES = {
    "resident_hit_ratio": "Share of selected pages that the device tier held, since start",
    "predicted_query_cosine": "Cosine of predicted and true query, mean of the samples",
    "attention_mass_recall": (
        "Attention mass on the selected tokens of rows that attend less than their context, mean of the samples"
    ),
}
_POOL_GAUGES: Mapping[str, str] = {
    "hybrid_resident_requests": "Running requests that own frames",
    "hybrid_frames_in_use": "Frames that hold a page or are being filled, summed over layers",
    "hybrid_host_pool_pages": "Pages of the host pool",
    "hybrid_digest_bytes": "Bytes of digests",
    "hybrid_frame_bytes": "Bytes of frames in the device tier",
    "hybrid_device_bytes": "Bytes of the device tier: frames, staging, digests and what the method keeps there",
    "hybrid_context_cache_bytes": "Bytes of host memory that the method keeps beside the host pool",
    "hybrid_persistent_heads": "KV heads whose whole KV is on the device, summed over layers",
    "hybrid_parked_rows": "Requests whose row waits for the CPU from one step to the next (apex)",
    "hybrid_late_rows": "Rows that found no answer of the CPU where they waited for it, since start (apex)",
    "hybrid_moved_requests": "Running requests that were moved between device and CPU, since start (apex)",
    "hybrid_speed_ratio": "Tokens that the device attends in the time of one on the CPU, as predicted (apex)",
    "hybrid_speed_bound": "The ratio below which pipelining pays, of the last step with rows on the CPU (apex)",
    "hybrid_quality_min_mass": "Attention mass that is promised (quality.min_mass)",
    "hybrid_quality_max_kl": "KL to dense in nats per token that goes with that mass, as profiled (quality.max_kl)",
    "hybrid_quality_mass": "Attention mass of the last round of samples, all layers (quality.min_mass)",
    "hybrid_quality_budget_tokens": "Tokens attended under pressure, mean of layers; inf: all (quality.min_mass)",
    "hybrid_copied_bytes": "Bytes copied from the host pool into frames and staging since start",
    "hybrid_bus_bytes_per_second": "Bytes per second that pages are copied at over the GPU's PCIe link, by its speed",
    "hybrid_budget_tokens": "Tokens attended under pressure, mean of layers, as configured (budget_tokens)",
    "hybrid_frames_per_request": "Frames of a request in the layer with least (frames_per_request)",
    "hybrid_recall_interval": "Decode steps between recalls, where all layers have the same (recall.intervals)",
    "hybrid_page_tokens": "Tokens of a page (page_size)",
    "hybrid_host_pool_bytes": "Bytes of the host pool (host_pool.size)",
    "hybrid_max_requests": "Requests that may run at once (--max-num-seqs, --max-running-requests)",
    "hybrid_step_tokens": "Tokens of a step with prompts (--max-num-batched-tokens, --chunked-prefill-size)",
    "hybrid_worker_threads": "Threads of the CPU workers (workers.threads)",
    "hybrid_worker_cpus": "CPUs that the CPU workers run on (workers.cpus)",
}


class Publisher:
    """Copy of the runtime's counters in Prometheus, updated at most once in ``interval`` seconds.

    Args:
        stats: the rank's counters.
        gauges: returns the gauges of the whole rank by metric name, and brings ``stats`` up to date.
        rank: number of the rank, a label of all metrics.
        registry: the registry of prometheus_client that the engine publishes.
        settings: the engine's own settings, as gauges by metric name.
        interval: seconds between two updates, at least.
    """

    def __init__(
        self,
        stats: Stats,
        gauges: Callable[[], Mapping[str, float]],
        rank: int,
        registry: CollectorRegistry,
        settings: Mapping[str, float] = MappingProxyType({}),
        interval: float = 0.5,
    ) -> None:
        self._stats, self._gauges, self._rank, self._interval = stats, gauges, str(rank), interval
        self._settings = settings
        self._last_time = float("-inf")
        self._published = [LayerStats() for _ in stats.layers]
        self._published_steps: dict[tuple[str, str], int] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["rank", *labels], registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, ["rank", *labels], registry=registry, multiprocess_mode="mostrecent")

        self._counters = {name: counter(f"hybrid_{name}", text, "layer") for name, text in _COUNTERS.items()}
        self._layer_gauges = {name: gauge(f"hybrid_{name}", text, "layer") for name, text in _LAYER_GAUGES.items()}
        self._pool_gauges = {name: gauge(name, text) for name, text in _POOL_GAUGES.items()}
        steps_text = "Decode steps by strategy, and by what the rule wanted (apex)"
        self._steps = counter("hybrid_steps", steps_text, "strategy", "wanted")
        # The first counter has a sample for all layers from the start, so that a reader knows their number.
        for layer in range(len(stats.layers)):
            self._counters["selected_tokens"].labels(self._rank, str(layer))

    def publish(self, force: bool = False) -> None:
        """Publish after a step; ``force`` when the engine goes idle, so that the last state is seen."""
        current = time.monotonic()
        if not force and current - self._last_time < self._interval:
            return
        self._last_time = current
        gauges = {**self._gauges(), **self._settings}
        for layer, (stats, published) in enumerate(zip(self._stats.layers, self._published, strict=True)):
            for name, counter in self._counters.items():
                growth = getattr(stats, name) - getattr(published, name)
                if growth:
                    counter.labels(self._rank, str(layer)).inc(growth)
                    setattr(published, name, getattr(stats, name))
            for name, gauge in self._layer_gauges.items():
                value = getattr(stats, name)
                if value is not None:
                    gauge.labels(self._rank, str(layer)).set(value)
        for kind, count in self._stats.steps.items():
            self._steps.labels(self._rank, *kind).inc(count - self._published_steps.get(kind, 0))
            self._published_steps[kind] = count
        for name, value in gauges.items():
            if not math.isnan(value):
                self._pool_gauges[name].labels(self._rank).set(value)
