"""Thresholds of KV heads and the choice of persistent heads of method ``clo`` (CLO, arXiv 2511.14510, section 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.config.heads import HeadScores, read_heads
from hybrid_backend.step.method import by_layer, named_heads
from hybrid_backend.tiers import TierLayout


def threshold(importance: float, eta: float, power: float) -> float:
    """Return tau, the least similarity at which a head of ``importance`` (0..1) keeps its pages (equations 7 to 9)."""
    share = importance**power
    return math.cos(share * math.acos(eta) + (1 - share) * math.pi)


def persistent_heads(
    tau: list[list[float]], similarity: list[list[float]], tolerance: float, prefetched: int
) -> list[tuple[float, int, int]]:
    """Return the heads whose pages are hard to reuse, the hardest first (equations 11 and 13).

    Args:
        tau: ``[layers][kv_heads]`` thresholds.
        similarity: ``[layers][kv_heads]`` mean cosines of adjacent queries.
        tolerance: epsilon of equation 11.
        prefetched: heads whose pages cross the bus while a layer computes (equation 12).

    Returns:
        ``(difficulty, layer, head)`` of each.
    """
    chosen: list[tuple[float, int, int]] = []
    for layer, heads in enumerate(zip(tau, similarity, strict=True)):
        hard = sorted(
            ((t - (s - tolerance), layer, head) for head, (t, s) in enumerate(zip(*heads, strict=True))), reverse=True
        )
        hard = [x for x in hard if x[0] > 0]
        chosen += hard[: max(0, len(hard) - prefetched)]
    return sorted(chosen, reverse=True)


def cached_pages(config: HybridConfig) -> int:
    """Return the pages that a head caches beside sinks and recent pages."""
    return config.budget_pages - config.sinks - config.recent


def head_scores(config: HybridConfig, layers: int, heads: int | None, kv_heads: int) -> HeadScores | None:
    """Return the scores in the heads file; None if all heads have importance 1."""
    return None if config.clo.heads == "uniform" else read_heads(config.clo.heads, layers, heads, kv_heads)


def kv_thresholds(config: HybridConfig, scores: HeadScores) -> list[list[float]]:
    """Return the thresholds ``[layers][kv_heads]`` of the heads in a file."""
    return [[threshold(s, config.clo.eta, config.clo.power) for s in layer] for layer in scores.kv_importance]


def head_policy(config: HybridConfig, model: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return thresholds ``[layers, kv_heads]`` and weights ``[layers, heads]``, fp32."""
    scores = head_scores(config, model.num_layers, model.num_heads, model.num_kv_heads)
    if scores is None:
        return (
            torch.full((model.num_layers, model.num_kv_heads), config.clo.eta),
            torch.ones(model.num_layers, model.num_heads),
        )
    return torch.tensor(kv_thresholds(config, scores)), torch.tensor(scores.importance)


def choose_persistent(config: HybridConfig, model: ModelSpec, layout: TierLayout) -> dict[int, tuple[int, ...]]:
    """Return the persistent KV heads of each layer."""
    layers, kv_heads, clo = layout.digest_layers(config, model), model.num_kv_heads, config.clo
    if clo.persistent == "none" or config.sparse == "never":
        return {}
    if clo.persistent == "auto":
        first = [(layout.full_layers(model)[0], head) for head in range(kv_heads)]
        hard = [(layer, head) for _, layer, head in _hard_heads(config, model)]
        heads = [x for x in dict.fromkeys(first + hard) if x[0] in layers]
    else:
        named = named_heads("clo.persistent", clo.persistent, model.num_layers, kv_heads)
        heads = [x for x in named if x[0] in layers]
    return by_layer(sorted(heads))


def _hard_heads(config: HybridConfig, model: ModelSpec) -> list[tuple[float, int, int]]:
    """Return `persistent_heads` of the heads file; none without a file that has similarities."""
    scores = head_scores(config, model.num_layers, model.num_heads, model.num_kv_heads)
    if scores is None or scores.similarity is None:
        return []
    a_load = cached_pages(config) * model.page_bytes(config.page_size) // model.num_kv_heads
    similarity = [list(layer) for layer in scores.similarity]
    return persistent_heads(
        kv_thresholds(config, scores), similarity, config.clo.tolerance, scores.prefetch_bytes // a_load
    )
