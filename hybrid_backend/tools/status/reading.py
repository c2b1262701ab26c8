"""A reading of a server's /metrics: the few numbers that the page shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hybrid_backend.errors import EngineError

_ENGINE_METRICS = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "pool_fill": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    "generated_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total",),
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "first_token_seconds": ("vllm:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_sum"),
    "first_tokens": ("vllm:time_to_first_token_seconds_count", "sglang:time_to_first_token_seconds_count"),
    "token_gap_seconds": ("vllm:inter_token_latency_seconds_sum", "sglang:inter_token_latency_seconds_sum"),
    "token_gaps": ("vllm:inter_token_latency_seconds_count", "sglang:inter_token_latency_seconds_count"),
}
"""Names of vLLM's and SGLang's metrics by the name of the figure."""
_SGLANG_TOKENS = "sglang:realtime_tokens_total"
"""Tokens by ``mode``, counted at each step. SGLang's other token counters stand still until a request ends."""
_QUEUES = {*_ENGINE_METRICS["running"], *_ENGINE_METRICS["waiting"]}
_NAMES = {_SGLANG_TOKENS}.union(*_ENGINE_METRICS.values())
_SAMPLED = {"hybrid_predicted_query_cosine": "query_cosine", "hybrid_attention_mass_recall": "mass_recall"}
_UNBOUNDED = "hybrid_quality_budget_tokens"
"""The gauge that may be infinite, which says that all tokens are attended."""
# Joins of the ranks' gauges. The ranks publish the same value of all gauges that are not listed.
_SUMMED = ("frames_in_use", "digest_bytes", "frame_bytes", "device_bytes", "context_cache_bytes", "copied_bytes")
_JOINS: dict[str, Callable[[Iterable[float]], float]] = {
    **{f"hybrid_{name}": sum for name in (*_SUMMED, "bus_bytes_per_second")},
    **{name: min for name in ("hybrid_quality_mass", _UNBOUNDED)},
}


@dataclass(frozen=True)
class LayerCounts:
    """Totals of one layer since the server's start, or between two readings. A figure that was never sampled is None.

    Tokens and pages are summed over ranks. Seconds are the slowest rank's, because ranks wait at the same time.
    """

    selected_tokens: float = 0.0
    context_tokens: float = 0.0
    cpu_tokens: float = 0.0
    recalled_pages: float = 0.0
    resident_hits: float = 0.0
    resident_lookups: float = 0.0
    wait_seconds: float = 0.0
    attention_seconds: float = 0.0
    mass_samples: float = 0.0
    query_cosine: float | None = None
    mass_recall: float | None = None

    def since(self, earlier: LayerCounts) -> LayerCounts:
        """Return the totals counted after ``earlier``; sampled figures stay means since the server's start."""
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in COUNTERS})

    @property
    def attended(self) -> float | None:
        """Share of the contexts' tokens that were attended."""
        return ratio(self.selected_tokens, self.context_tokens)

    @property
    def residency(self) -> float | None:
        """Share of the selected pages that were resident."""
        return ratio(self.resident_hits, self.resident_lookups)

    @property
    def cpu_ratio(self) -> float | None:
        """Share of the attended tokens that the CPU workers attended."""
        return ratio(self.cpu_tokens, self.selected_tokens)


COUNTERS = [attribute.name for attribute in fields(LayerCounts) if attribute.default is not None]


@dataclass(frozen=True)
class Reading:
    """The server's metrics at one time. Data-parallel replicas are summed; counters are totals since the start.

    ``figures`` has the engine's figures by the names of `_ENGINE_METRICS`, and the plugin's gauges without ``hybrid_``.
    """

    time: float
    engine: str | None = None
    model: str | None = None
    replicas: int = 1
    figures: Mapping[str, float] = field(default_factory=dict)
    layers: tuple[LayerCounts, ...] = ()

    def get(self, name: str) -> float | None:
        """Return a figure; None if the server does not publish it."""
        return self.figures.get(name)

    def growth(self, earlier: Reading, name: str) -> float | None:
        """Return the growth of a counter since ``earlier``. A counter that was not published yet began at zero."""
        after = self.get(name)
        return None if after is None else after - (earlier.get(name) or 0.0)

    @property
    def is_in_place(self) -> bool:
        """True if the CPU attended all tokens in the host pool so far: no frames, no copies, no CPU workers."""
        moves = sum(layer.cpu_tokens + layer.wait_seconds + layer.recalled_pages for layer in self.layers)
        return bool(self.layers) and self.get("frame_bytes") == 0 and not self.get("copied_bytes") and not moves


def ratio(share: float, whole: float) -> float | None:
    """Divide within 0..1, because a reading may fall between the publication of two counters."""
    return min(max(share / whole, 0.0), 1.0) if whole > 0 else None


def read(text: str, time: float) -> Reading:
    """Return the reading in a Prometheus text. Metrics of neither the engine nor the plugin are skipped unparsed.

    Raises:
        EngineError: a line that is needed cannot be parsed.
    """
    samples = _samples(text)
    engine_samples = [sample for name in samples if ":" in name for sample in samples[name]]
    figures: dict[str, float] = {
        name.removeprefix("hybrid_"): _JOINS.get(name, max)(sample.value for sample in same_name)
        for name, same_name in samples.items()
        if name.startswith("hybrid_") and "layer" not in same_name[0].labels
    }
    replicas = 1
    for figure, names in _ENGINE_METRICS.items():
        by_replica = _by_replica(sample for name in names for sample in samples.get(name, ()))
        if by_replica:
            figures[figure] = (max if figure == "pool_fill" else sum)(by_replica.values())
            replicas = len(by_replica) if figure == "running" else replicas
    if _SGLANG_TOKENS in samples:
        figures |= _sglang_tokens(samples[_SGLANG_TOKENS])
    return Reading(
        time=time,
        engine=next((sample.name.partition(":")[0] for sample in engine_samples), None),
        model=next(filter(None, (sample.labels.get("model_name") for sample in engine_samples)), None),
        replicas=replicas,
        figures=figures,
        layers=_layers(samples),
    )


def _samples(text: str) -> dict[str, list[Any]]:
    """Parse the samples that the page needs, by metric name."""
    # Imported late: an engine that shares its metrics among processes must say so before the first import.
    from prometheus_client.parser import text_string_to_metric_families

    by_name: dict[str, list[Any]] = defaultdict(list)
    lines = (line for line in text.splitlines() if line.startswith(("hybrid_", *_NAMES)))
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                # SGLang publishes the totals of its queues, and the same requests again by priority.
                is_repeated = sample.name in _QUEUES and sample.labels.get("priority")
                is_number = math.isfinite(sample.value) or (sample.name == _UNBOUNDED and sample.value > 0)
                if is_number and not is_repeated:
                    by_name[sample.name].append(sample)
    except (ValueError, KeyError, IndexError) as error:
        raise EngineError(f"the server's /metrics is not Prometheus text: {error}") from error
    return by_name


def _sglang_tokens(samples: Iterable[Any]) -> dict[str, float]:
    """Return the figures of the tokens that SGLang's schedulers counted."""
    by_mode: dict[str, float] = defaultdict(float)
    for labels, value in _by_replica(samples).items():
        by_mode[dict(labels).get("mode", "")] += value
    cached, computed = by_mode["prefill_cache"], by_mode["prefill_compute"]
    prompts = {"prompt_tokens": computed, "prefix_hits": cached, "prefix_queries": cached + computed}
    return prompts | {"generated_tokens": by_mode["decode"]}


def _by_replica(samples: Iterable[Any]) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the value of each data-parallel replica, whose tensor- and pipeline-parallel ranks report the same."""
    replicas: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        labels = sample.labels.items()
        key = tuple(sorted(label for label in labels if label[0] not in ("tp_rank", "pp_rank", "pid")))
        replicas[key] = max(replicas.get(key, 0.0), sample.value)
    return replicas


def _layers(samples: Mapping[str, list[Any]]) -> tuple[LayerCounts, ...]:
    """Join the ranks' figures of each layer. The plugin publishes selected tokens of all layers from the start."""
    layers: dict[int, dict[str, float]] = defaultdict(dict)
    for metric, name in ({f"hybrid_{name}_total": name for name in COUNTERS} | _SAMPLED).items():
        join = min if metric in _SAMPLED else max if name.endswith("seconds") else float.__add__
        for sample in samples.get(metric, ()):
            counts, value = layers[_layer_of(sample)], float(sample.value)
            counts[name] = join(counts[name], value) if name in counts else value
    return tuple(LayerCounts(**layers[layer]) for layer in range(max(layers, default=-1) + 1))


def _layer_of(sample: Any) -> int:
    text = sample.labels.get("layer", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise EngineError(f"the server's /metrics is not of this version: {sample.name} has layer={text!r}")
    return int(text)
