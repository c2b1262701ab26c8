"""Which KV heads of method `clo` keep what they loaded, and which are persistent (CLO, arXiv 2511.14510, section 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig, format_size
from hybrid_backend.config.heads import HeadScores, read_heads
from hybrid_backend.errors import ConfigError
from hybrid_backend.step.method import by_layer, named_heads
from hybrid_backend.tiers import TierLayout
from hybrid_backend.tiers.heads import resident_bytes


def threshold(importance: float, eta: float, power: float) -> float:
    """tau, the similarity from which on a head of ``importance`` (0..1) keeps what it has loaded (equations 7 to 9)."""
    share = importance**power
    return math.cos(share * math.acos(eta) + (1 - share) * math.pi)


def persistent_heads(
    tau: list[list[float]], similarity: list[list[float]], tolerance: float, prefetched: int
) -> list[tuple[float, int, int]]:
    """Heads that are hard to reuse, the hardest first (equations 11 and 13).

    Args:
        tau, similarity: ``[layers][kv_heads]``: thresholds, and mean cosines of adjacent queries.
        prefetched: heads whose pages cross the bus while a layer computes (equation 12).

    Returns:
        ``(difficulty, layer, head)`` of each.
    """
    found: list[tuple[float, int, int]] = []
    for layer, heads in enumerate(zip(tau, similarity, strict=True)):
        hard = sorted(
            ((t - (s - tolerance), layer, head) for head, (t, s) in enumerate(zip(*heads, strict=True))), reverse=True
        )
        hard = [x for x in hard if x[0] > 0]
        found += hard[: max(0, len(hard) - prefetched)]
    return sorted(found, reverse=True)


def cached_pages(config: HybridConfig) -> int:
    """Pages that a head caches beside sinks and recent ones."""
    return config.budget_pages - config.sinks - config.recent


def head_scores(config: HybridConfig, layers: int, heads: int | None, kv_heads: int) -> HeadScores | None:
    """None: all heads have importance 1."""
    return None if config.clo.heads == "uniform" else read_heads(config.clo.heads, layers, heads, kv_heads)


def kv_thresholds(config: HybridConfig, scores: HeadScores) -> list[list[float]]:
    """``[layers][kv_heads]``"""
    return [[threshold(s, config.clo.eta, config.clo.power) for s in layer] for layer in scores.kv_importance]


def head_policy(config: HybridConfig, model: ModelSpec) -> tuple[Tensor, Tensor]:
    """``([layers, kv_heads] thresholds, [layers, heads] weights)``, fp32."""
    scores = head_scores(config, model.num_layers, model.num_heads, model.num_kv_heads)
    if scores is None:
        return (
            torch.full((model.num_layers, model.num_kv_heads), config.clo.eta),
            torch.ones(model.num_layers, model.num_heads),
        )
    return torch.tensor(kv_thresholds(config, scores)), torch.tensor(scores.importance)


def choose_persistent(
    config: HybridConfig, model: ModelSpec, layout: TierLayout, pages: int
) -> dict[int, tuple[int, ...]]:
    """By layer, over a host pool of ``pages`` pages.

    Raises:
        ConfigError: those that are named take more than `clo.persistent_size`.
    """
    layers, every, clo = layout.digest_layers(config, model), model.num_kv_heads, config.clo
    if clo.persistent == "none" or config.sparse == "never":
        return {}
    if clo.persistent == "auto":
        first = [(layout.full_layers(model)[0], head) for head in range(every)]
        hard = [(layer, head) for _, layer, head in _hard_heads(config, model)]
        wanted = [x for x in dict.fromkeys(first + hard) if x[0] in layers]
    else:
        named = named_heads("clo.persistent", clo.persistent, model.num_layers, every)
        wanted = [x for x in named if x[0] in layers]
    a_head = resident_bytes({0: (0,)}, model, config.page_size, pages)
    if clo.persistent_size != "auto" and len(wanted) * a_head > clo.persistent_size:
        if clo.persistent != "auto":
            raise ConfigError(
                f"clo.persistent: {len(wanted)} heads take {len(wanted) * a_head / 2**20:.0f} MiB over a host pool of "
                f"{pages} pages, more than clo.persistent_size {format_size(clo.persistent_size)}; name "
                f"{clo.persistent_size // a_head} or fewer, or raise it"
            )
        wanted = wanted[: clo.persistent_size // a_head]
    return by_layer(sorted(wanted))


def _hard_heads(config: HybridConfig, model: ModelSpec) -> list[tuple[float, int, int]]:
    scores = head_scores(config, model.num_layers, model.num_heads, model.num_kv_heads)
    if scores is None or scores.similarity is None:
        return []
    a_load = cached_pages(config) * model.kv_format(config.page_size).with_heads(1).page_bytes
    similarity = [list(layer) for layer in scores.similarity]
    return persistent_heads(
        kv_thresholds(config, scores), similarity, config.clo.tolerance, scores.prefetch_bytes // a_load
    )
