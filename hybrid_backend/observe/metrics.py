"""Prometheus metrics of one rank, published on the engine's /metrics. What they mean: `observe.stats`.

A figure that was not counted or sampled yet has no sample, nor has one that the path that decodes cannot know.

The engine's worker and its API server are different processes. prometheus_client joins them through a directory
(``PROMETHEUS_MULTIPROC_DIR``), which `hybrid serve` creates and removes; without that variable the metrics stay in the
worker's own registry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from hybrid_backend.observe.stats import LayerStats, Stats


class _LayerMetric(NamedTuple):
    name: str
    help: str
    value: Callable[[LayerStats], float]


_COUNTERS = (
    _LayerMetric("hybrid_selected_tokens", "Tokens attended by decoding rows", lambda s: s.selected_tokens),
    _LayerMetric("hybrid_context_tokens", "Tokens in the contexts of decoding rows", lambda s: s.context_tokens),
    _LayerMetric("hybrid_cpu_tokens", "Tokens attended by the CPU workers", lambda s: s.cpu_tokens),
    _LayerMetric("hybrid_recalled_pages", "Pages recalled into frames", lambda s: s.recalled_pages),
    _LayerMetric("hybrid_resident_hits", "Selected pages that the device tier held", lambda s: s.resident_hits),
    _LayerMetric("hybrid_resident_lookups", "Selected pages, resident or not", lambda s: s.resident_lookups),
    _LayerMetric("hybrid_head_lookups", "KV heads whose cached pages were looked up (clo)", lambda s: s.head_lookups),
    _LayerMetric("hybrid_head_hits", "KV heads that kept their cached pages (clo)", lambda s: s.head_hits),
    _LayerMetric(
        "hybrid_loaded_head_pages",
        "Pages of one KV head copied to the device tier where its cache missed (clo)",
        lambda s: s.loaded_head_pages,
    ),
    _LayerMetric(
        "hybrid_wait_seconds",
        "Seconds that the device tier stood still for CPU partials",
        lambda s: s.wait_seconds,
    ),
    _LayerMetric(
        "hybrid_attention_seconds",
        "Seconds that decoding rows' attention took, where the CPU attends in place",
        lambda s: s.attention_seconds,
    ),
    _LayerMetric(
        "hybrid_lead_seconds",
        "Seconds by which CPU partials were asked for before they were needed",
        lambda s: s.lead_seconds,
    ),
)
_GAUGES = (
    _LayerMetric(
        "hybrid_resident_hit_ratio",
        "Share of selected pages that the device tier held, since start",
        lambda s: s.resident_hits / s.resident_lookups if s.resident_lookups else float("nan"),
    ),
    _LayerMetric(
        "hybrid_predicted_query_cosine",
        "Cosine of predicted and true query, mean of the samples",
        lambda s: s.cosine_sum / s.cosine_samples if s.cosine_samples else float("nan"),
    ),
    _LayerMetric(
        "hybrid_attention_mass_recall",
        "Attention mass on the selected tokens of rows that attend less than their context, mean of the samples",
        lambda s: s.mass_sum / s.mass_samples if s.mass_samples else float("nan"),
    ),
)
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
    "hybrid_worker_threads": "Threads of the CPU workers (workers.threads)",
    "hybrid_worker_cpus": "CPUs that they run on (workers.cpus)",
}


class Publisher:
    """Copies the runtime's counters into Prometheus at most every ``interval`` seconds."""

    def __init__(
        self,
        stats: Stats,
        gauges: Callable[[], Mapping[str, float]],
        rank: int,
        registry: CollectorRegistry,
        interval: float = 0.5,
    ) -> None:
        self._stats = stats
        self._gauges = gauges
        self._interval = interval
        self._last = float("-inf")
        labels = ["rank", "layer"]
        self._counters = [Counter(m.name, m.help, labels, registry=registry) for m in _COUNTERS]
        self._layer_gauges = [
            Gauge(m.name, m.help, labels, registry=registry, multiprocess_mode="mostrecent") for m in _GAUGES
        ]
        self._pool_gauges = {
            name: Gauge(name, text, ["rank"], registry=registry, multiprocess_mode="mostrecent")
            for name, text in _POOL_GAUGES.items()
        }
        self._steps = Counter(
            "hybrid_steps", "Decode steps by strategy, and by what the rule wanted (apex)",
            ["rank", "strategy", "wanted"], registry=registry,
        )  # fmt: skip
        self._stepped: dict[tuple[str, str], int] = {}
        self._rank = str(rank)
        for layer in range(len(stats.layers)):
            self._counters[0].labels(self._rank, str(layer))  # who reads learns of every layer from the start
        self._published = [[0.0] * len(_COUNTERS) for _ in stats.layers]

    def publish(self, force: bool = False) -> None:
        """Call after each step; ``force`` when the engine goes idle, so that the last state is seen."""
        now = time.monotonic()
        if not force and now - self._last < self._interval:
            return
        self._last = now
        gauges = self._gauges()  # first: it brings the counters up to date
        for layer, entry in enumerate(self._stats.layers):
            before = self._published[layer]
            for i, metric in enumerate(_COUNTERS):
                value = metric.value(entry)
                if value != before[i]:
                    self._counters[i].labels(self._rank, str(layer)).inc(value - before[i])
                    before[i] = value
            for gauge, metric in zip(self._layer_gauges, _GAUGES, strict=True):
                value = metric.value(entry)
                if value == value:  # not NaN: nothing sampled yet
                    gauge.labels(self._rank, str(layer)).set(value)
        for kind, count in self._stats.steps.items():
            self._steps.labels(self._rank, *kind).inc(count - self._stepped.get(kind, 0))
            self._stepped[kind] = count
        for name, value in gauges.items():
            if value == value:
                self._pool_gauges[name].labels(self._rank).set(value)
