"""A reading of a server's /metrics: the few numbers that the page shows, out of the engine's many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid_backend.errors import EngineError

# What each engine calls the same thing. Counters are totals since start.
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
POOL_FILL = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
PROMPTED = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
PREEMPTED = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
FIRST_TOKEN = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
TOKEN_GAP = ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds")
PREFIX_HITS, PREFIX_QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
SGLANG_TOKENS = "sglang:realtime_tokens_total"
"""Tokens by ``mode``, counted at every step. SGLang counts those of GENERATED and PROMPTED when a request ends."""

_COUNTS = {
    "hybrid_selected_tokens_total": "selected_tokens",
    "hybrid_context_tokens_total": "context_tokens",
    "hybrid_cpu_tokens_total": "cpu_tokens",
    "hybrid_recalled_pages_total": "recalled_pages",
    "hybrid_resident_hits_total": "resident_hits",
    "hybrid_resident_lookups_total": "resident_lookups",
}
_SECONDS = {
    "hybrid_wait_seconds_total": "wait_seconds",
    "hybrid_lead_seconds_total": "lead_seconds",
    "hybrid_attention_seconds_total": "attention_seconds",
}
_SAMPLED = {
    "hybrid_predicted_query_cosine": "query_cosine",
    "hybrid_attention_mass_recall": "mass_recall",
}
_EVERY_LAYER = "hybrid_selected_tokens_total"  # written for every layer from the start, the others once they count
_SUMMED = (
    "hybrid_frames_in_use",
    "hybrid_digest_bytes",
    "hybrid_frame_bytes",
    "hybrid_device_bytes",
    "hybrid_context_cache_bytes",
    "hybrid_copied_bytes",
    "hybrid_bus_bytes_per_second",
)
_SAME_ON_EVERY_RANK = (
    "hybrid_resident_requests",
    "hybrid_host_pool_pages",
    "hybrid_quality_min_mass",
    "hybrid_quality_max_kl",
    # The configuration as it is served: what can be changed.
    "hybrid_budget_tokens",
    "hybrid_frames_per_request",
    "hybrid_recall_interval",
    "hybrid_page_tokens",
    "hybrid_host_pool_bytes",
    "hybrid_max_requests",
    "hybrid_worker_threads",
    "hybrid_worker_cpus",
)
_LEAST_OF_RANKS = (  # each watches its own heads, and promises the same
    "hybrid_quality_mass",
    "hybrid_quality_budget_tokens",
)
_MAY_BE_INFINITE = ("hybrid_quality_budget_tokens",)  # which says that everything is attended
_WANTED = (
    *(name for names in (RUNNING, WAITING, POOL_FILL, GENERATED, PROMPTED, PREEMPTED) for name in names),
    *(f"{name}_{part}" for names in (FIRST_TOKEN, TOKEN_GAP) for name in names for part in ("sum", "count")),
    PREFIX_HITS, PREFIX_QUERIES, SGLANG_TOKENS,
    *_COUNTS, *_SECONDS, *_SAMPLED, *_SUMMED, *_SAME_ON_EVERY_RANK, *_LEAST_OF_RANKS,
)  # fmt: skip


@dataclass(frozen=True)
class LayerCounts:
    """Totals of one layer since the server started; ``None`` where nothing was sampled yet.

    Tokens and pages are summed over ranks; seconds are the slowest rank's, because ranks wait at the same time.
    """

    selected_tokens: float = 0.0
    context_tokens: float = 0.0
    cpu_tokens: float = 0.0
    recalled_pages: float = 0.0
    resident_hits: float = 0.0
    resident_lookups: float = 0.0
    wait_seconds: float = 0.0
    lead_seconds: float = 0.0
    attention_seconds: float = 0.0
    query_cosine: float | None = None
    mass_recall: float | None = None


@dataclass(frozen=True)
class Durations:
    """Totals of one of the engine's histograms since the server started."""

    seconds: float
    count: float

    @property
    def mean(self) -> float | None:
        """Seconds; None if nothing was observed."""
        return self.seconds / self.count if self.count > 0 else None

    def since(self, before: Durations | None) -> Durations:
        """Return the totals of what was observed after ``before``."""
        return self if before is None else Durations(self.seconds - before.seconds, self.count - before.count)


@dataclass(frozen=True)
class Reading:
    """The server at one moment. ``time``: Unix seconds; ``pool_fill``: 0..1; ``gauges``: by metric name;
    ``replicas``: data-parallel ones, whose requests are added up."""

    time: float
    engine: str | None = None
    model: str | None = None
    running: float | None = None
    waiting: float | None = None
    pool_fill: float | None = None
    generated_tokens: float | None = None
    prompt_tokens: float | None = None
    preemptions: float | None = None
    prefix_hits: float | None = None
    """Prompt tokens whose KV was in the engine's prefix cache."""
    prefix_queries: float | None = None
    """Prompt tokens that were looked up there."""
    first_token: Durations | None = None
    """From a request's arrival to its first token (TTFT)."""
    token_gap: Durations | None = None
    """Between two tokens of one request (TPOT)."""
    layers: tuple[LayerCounts, ...] = ()
    gauges: Mapping[str, float] = field(default_factory=dict)
    replicas: int = 1

    @property
    def is_in_place(self) -> bool:
        """True if all that was attended so far lay where it was attended: no frames, no copies, no CPU workers."""
        moves = sum(layer.cpu_tokens + layer.wait_seconds + layer.recalled_pages for layer in self.layers)
        frames, copied = self.gauges.get("hybrid_frame_bytes"), self.gauges.get("hybrid_copied_bytes", 0.0)
        return bool(self.layers) and frames == 0 and not copied and not moves

    @property
    def token_bytes(self) -> float | None:
        """K and V of one token in one layer, mean of the layers; None if the server does not publish its pool."""
        pool, pages, tokens = (
            self.gauges.get(f"hybrid_{name}") for name in ("host_pool_bytes", "host_pool_pages", "page_tokens")
        )
        return pool / (pages * tokens * len(self.layers)) if pool and pages and tokens and self.layers else None


@dataclass(frozen=True)
class _Sample:
    name: str
    labels: Mapping[str, str]
    value: float


def read(text: str, time: float) -> Reading:
    """The reading in a Prometheus text; metrics of neither engine nor plugin are skipped unread.

    Raises EngineError if a line that is needed cannot be understood.
    """
    samples = list(_samples(text))
    by_name: dict[str, list[_Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    present = {name: _total_over_replicas(same_name) for name, same_name in by_name.items() if ":" in name}

    def engines(names: tuple[str, str]) -> float | None:
        return next((present[name] for name in names if name in present), None)

    def durations(names: tuple[str, str]) -> Durations | None:
        return next(
            (Durations(present[f"{n}_sum"], present[f"{n}_count"]) for n in names if f"{n}_count" in present), None
        )

    tokens = _tokens_by_mode(by_name.get(SGLANG_TOKENS, ()))
    cached, computed = tokens.get("prefill_cache", 0.0), tokens.get("prefill_compute", 0.0)
    fill = [s.value for name in POOL_FILL for s in by_name.get(name, ())]
    replicas = len(_by_replica(s for name in RUNNING for s in by_name.get(name, ())))
    gauges = {name: sum(s.value for s in by_name[name]) for name in _SUMMED if name in by_name}
    gauges |= {name: max(s.value for s in by_name[name]) for name in _SAME_ON_EVERY_RANK if name in by_name}
    gauges |= {name: min(s.value for s in by_name[name]) for name in _LEAST_OF_RANKS if name in by_name}
    engine_samples = [s for s in samples if ":" in s.name]
    return Reading(
        time=time,
        engine=next((s.name.partition(":")[0] for s in engine_samples), None),
        model=next((s.labels["model_name"] for s in engine_samples if s.labels.get("model_name")), None),
        running=engines(RUNNING),
        waiting=engines(WAITING),
        pool_fill=max(fill) if fill else None,
        generated_tokens=tokens.get("decode", 0.0) if tokens else engines(GENERATED),
        prompt_tokens=computed if tokens else engines(PROMPTED),
        preemptions=engines(PREEMPTED),
        prefix_hits=cached if tokens else present.get(PREFIX_HITS),
        prefix_queries=cached + computed if tokens else present.get(PREFIX_QUERIES),
        first_token=durations(FIRST_TOKEN),
        token_gap=durations(TOKEN_GAP),
        layers=_layers(by_name),
        gauges=gauges,
        replicas=max(replicas, 1),
    )


def _samples(text: str) -> Iterator[_Sample]:
    # Imported late: an engine that shares its metrics among processes must say so before the first import.
    from prometheus_client.parser import text_string_to_metric_families

    lines = (line for line in text.splitlines() if line.startswith(_WANTED))
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name in _WANTED and _is_said(sample.name, sample.value) and not _is_repeated(sample):
                    yield _Sample(sample.name, sample.labels, float(sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise EngineError(f"the server's /metrics is not Prometheus text: {error}") from error


def _is_repeated(sample: Any) -> bool:
    """Return whether a sample is part of a total that stands beside it: SGLang repeats its queues by priority."""
    return sample.name in (*RUNNING, *WAITING) and bool(sample.labels.get("priority"))


def _is_said(name: str, value: float) -> bool:
    return math.isfinite(value) or (value == math.inf and name in _MAY_BE_INFINITE)


def _tokens_by_mode(samples: Iterable[_Sample]) -> dict[str, float]:
    """Tokens of SGLang's schedulers by what they were computed for: decode, prefill_compute, prefill_cache."""
    by_mode: dict[str, list[_Sample]] = {}
    for sample in samples:
        by_mode.setdefault(sample.labels.get("mode", ""), []).append(sample)
    return {mode: _total_over_replicas(of_mode) for mode, of_mode in by_mode.items()}


def _total_over_replicas(samples: Iterable[_Sample]) -> float:
    return sum(_by_replica(samples).values())


def _by_replica(samples: Iterable[_Sample]) -> dict[tuple[str, ...], float]:
    """Data-parallel replicas add up; tensor- and pipeline-parallel ranks report the same requests."""
    groups: dict[tuple[str, ...], float] = {}
    for sample in samples:
        key = tuple(sorted(f"{k}={v}" for k, v in sample.labels.items() if k not in ("tp_rank", "pp_rank", "pid")))
        groups[key] = max(groups.get(key, 0.0), sample.value)
    return groups


def _layers(by_name: Mapping[str, list[_Sample]]) -> tuple[LayerCounts, ...]:
    fields: dict[int, dict[str, float]] = {_layer_of(sample): {} for sample in by_name.get(_EVERY_LAYER, ())}
    for names, join in ((_COUNTS, _add), (_SECONDS, max), (_SAMPLED, min)):
        for name, attribute in names.items():
            for sample in by_name.get(name, ()):
                layer = _layer_of(sample)
                entry = fields.setdefault(layer, {})
                entry[attribute] = join(entry[attribute], sample.value) if attribute in entry else sample.value
    return tuple(LayerCounts(**fields.get(layer, {})) for layer in range(max(fields, default=-1) + 1))


def _add(a: float, b: float) -> float:
    return a + b


def _layer_of(sample: _Sample) -> int:
    text = sample.labels.get("layer", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise EngineError(f"the server's /metrics is not of this version: {sample.name} has layer={text!r}")
    return int(text)
