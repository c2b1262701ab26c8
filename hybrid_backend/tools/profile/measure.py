"""Measurements of every full-attention layer over the last positions of one window, in one pass through the model.

The prefill is teacher forced. The query of position p is the one that decoding token p would have, and the keys before
it are the ones that decoding would attend. So one pass gives many decode steps of all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn import functional

from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels import oracle
from hybrid_backend.kernels.digest_format import DigestFormat, format_named
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.step.admission import best_pages, frames_for, place
from hybrid_backend.step.method import frames_per_request
from hybrid_backend.step.operations import resolve_operations
from hybrid_backend.tiers.state import StepState
from hybrid_backend.tools.profile.network import Layer, Network, Rope
from hybrid_backend.tools.profile.texts import Window

_ELEMENTS = 1 << 24
"""Attention weights in memory at once."""


class LayerMeasure(BaseModel):
    """Measurements of one layer on one window: means over positions, and over heads unless each head has a value.

    Attributes:
        layer: index in the model.
        cosine: cosine of predicted and true query, None for the first layer.
        mass: attention mass on the pages that the backend selects.
        ratios: by recall interval the mean share of attended tokens on the CPU.
        similarity: per KV head, `adjacent_cosine` of the queries that the backend selects by.
    """

    model_config = ConfigDict(frozen=True)
    layer: int
    cosine: float | None
    mass: float
    ratios: dict[int, float]
    similarity: tuple[float, ...]


Measures = Sequence[Sequence[LayerMeasure]]
"""Measurements of each window, of each full-attention layer."""


def measure_window(
    network: Network,
    config: HybridConfig,
    window: Window,
    positions: int,
    intervals: Sequence[int],
    least_cosine: float = -1.0,
    advance: Callable[[], None] = lambda: None,
    budgets: Mapping[int, int] | None = None,
) -> list[LayerMeasure]:
    """Measure all full-attention layers over the last ``positions`` tokens of the window.

    ``advance`` is called after each layer; ``budgets`` has the tokens of layers with a budget of their own, while all
    layers have equally many frames; the other arguments are those of `measure_layer`.
    """
    measured: list[LayerMeasure] = []
    previous: list[Tensor] = []  # input of the previous layer at the measured positions

    def watch(index: int, x: Tensor, rope: Rope) -> None:
        layer, late = network.layers[index], x[-positions:]
        if layer.window is None:
            q, k = layer.queries_and_keys(x, rope)
            prompt, decoded = q[-positions - 1 :].cpu().split([1, positions])
            ahead = None
            if previous:
                late_rope = (rope[0][:, -positions:], rope[1][:, -positions:])
                ahead = layer.queries_and_keys(previous[0], late_rope)[0].cpu()
            own = config
            if budgets is not None:
                frames, tokens = frames_per_request(config), budgets.get(index, config.budget_tokens)
                own = config.model_copy(update={"budget_tokens": tokens, "frames_per_request": frames})
            measured.append(measure_layer(layer, own, prompt, decoded, ahead, k.cpu(), intervals, least_cosine))
        previous[:] = [late]
        advance()

    with torch.inference_mode(), network.watched(watch):
        network.hidden(window.ids)
    return measured


def measure_layer(
    layer: Layer,
    config: HybridConfig,
    prompt: Tensor,
    q: Tensor,
    ahead: Tensor | None,
    k: Tensor,
    intervals: Sequence[int],
    least_cosine: float = -1.0,
) -> LayerMeasure:
    """Measure one layer.

    Args:
        layer: the layer.
        config: page size, budget, selection, frames.
        prompt: ``[1, heads, head_dim]``, the true query before ``q``: it chooses the pages that are resident at first.
        q: ``[N, heads, head_dim]``, the true queries of the last N positions.
        ahead: the predicted queries of the same positions, None if there are none.
        k: ``[tokens, kv_heads, head_dim]``.
        intervals: recall intervals that are simulated.
        least_cosine: smallest cosine of predicted and true queries with which the predicted ones select.
    """
    seq_lens = torch.arange(len(k) - len(q) + 1, len(k) + 1)
    digests = page_digests(k, config.page_size, format_named(config.selection.digest))
    cosine = None if ahead is None else round(float(torch.cosine_similarity(ahead, q, dim=-1).mean()), 5)
    is_predicted = cosine is not None and cosine >= least_cosine and config.lookahead.enabled is not False
    selecting = ahead if ahead is not None and is_predicted else q
    chosen, scores = select(selecting, digests, seq_lens, config, layer.scale)
    shares = page_shares(q, k, seq_lens, config.page_size, layer.scale)
    operations = resolve_operations(config, torch.device("cpu"))
    table, first = torch.arange(len(digests), dtype=torch.int32)[None], -(-int(seq_lens[0]) // config.page_size)
    frames = frames_per_request(config)
    admission = best_pages(operations, config, prompt, digests, table[:, :first], first, frames, layer.scale)
    steps = cpu_ratios(operations, config, Decoded(scores, seq_lens, admission), frames, intervals, layer.index)
    return LayerMeasure(
        layer=layer.index,
        cosine=cosine,
        mass=round(float((shares * chosen[:, :, None]).sum(-1).mean()), 5),
        ratios=dict(zip(intervals, _rounded(steps.mean(1)), strict=True)),
        similarity=_rounded(adjacent_cosine(selecting, k.shape[1])),
    )


def adjacent_cosine(q: Tensor, kv_heads: int) -> Tensor:
    """Return the similarity of the queries of adjacent decode steps (s^ of CLO, section 3.3), ``[kv_heads]``.

    It is the mean cosine of a query of ``q`` ``[N, heads, head_dim]`` and the next one of its head, over the N - 1
    pairs and the query heads of a KV head, which are neighbours.
    """
    cosines = torch.cosine_similarity(q[1:], q[:-1], dim=-1)
    means: Tensor = cosines.unflatten(1, (kv_heads, -1)).mean((0, 2))
    return means


def page_digests(k: Tensor, page_size: int, digest_format: DigestFormat) -> Tensor:
    """Return the digest of every page, in one format. The last page may be partly filled.

    A page's digest is the final one, also for steps at which the page is still growing: those pages are always
    attended.
    """
    padding, (_, kv_heads, dim) = -len(k) % page_size, k.shape
    filled = torch.cat([k, k[-1:].expand(padding, -1, -1)])
    pages = torch.arange(len(filled) // page_size, dtype=torch.int32)
    shape = digest_format.shape(len(pages), kv_heads, dim)
    digests = torch.empty(shape, dtype=digest_format.dtype(k.dtype))
    oracle.extend_digests(filled, digests, pages, 0, page_size)
    return digests


def select(q: Tensor, digests: Tensor, seq_lens: Tensor, config: HybridConfig, scale: float) -> tuple[Tensor, Tensor]:
    """Return the pages that a decode step selects, bool, and the scores of pages; both ``[N, lists, P]``."""
    operations, selection, pages = resolve_operations(config, torch.device("cpu")), config.selection, len(digests)
    per_head, budget = selection.granularity == "kv_head", config.budget_pages
    chosen, scores = [], []
    for part in _slices(len(q), digests.numel()):
        lens = seq_lens[part].int()
        num_pages, rows = (lens + config.page_size - 1) // config.page_size, len(lens)
        table, budgets = torch.arange(pages, dtype=torch.int32).repeat(rows, 1), torch.full_like(lens, budget)
        page_scores = operations.page_scores(
            q[part].contiguous(), digests, table, num_pages, budgets, selection.aggregate, per_head,
            selection.bound, scale, config.page_size,
        )  # fmt: skip
        picked = operations.select_pages(
            page_scores, num_pages, lens, budgets, torch.zeros_like(lens), None, table, config.page_size, config.sinks,
            config.recent, min(budget, pages),
        )  # fmt: skip
        listed = torch.arange(picked.pages.shape[2]) < picked.pages_listed[..., None]
        mask = torch.zeros(*page_scores.shape[:2], pages + 1, dtype=torch.bool)
        chosen.append(mask.scatter_(2, torch.where(listed, picked.pages, pages).long(), True)[..., :pages])
        scores.append(page_scores)
    return torch.cat(chosen), torch.cat(scores)


def page_shares(q: Tensor, k: Tensor, seq_lens: Tensor, page_size: int, scale: float) -> Tensor:
    """Return the attention mass of each page by the true fp32 weights, ``[N, kv_heads, group, P]``."""
    shares, tokens = [], torch.arange(len(k))
    for part in _slices(len(q), q.shape[1] * len(k)):
        grouped = q[part].float().unflatten(1, (k.shape[1], -1))
        logits = torch.einsum("nhgd,thd->nhgt", grouped, k.float()) * scale
        later = tokens >= seq_lens[part, None]
        weights = logits.masked_fill(later[:, None, None], float("-inf")).softmax(-1)
        shares.append(functional.pad(weights, (0, -len(k) % page_size)).unflatten(-1, (-1, page_size)).sum(-1))
    return torch.cat(shares)


def _slices(rows: int, elements: int) -> list[slice]:
    """Return slices of ``rows`` with about `_ELEMENTS` elements at ``elements`` per row."""
    step = max(1, _ELEMENTS // elements)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _rounded(values: Iterable[Tensor]) -> tuple[float, ...]:
    return tuple(round(float(value), 5) for value in values)


@dataclass(frozen=True)
class Decoded:
    """Inputs of one layer over N consecutive decode steps of one sequence with P pages at the end.

    Attributes:
        scores: ``[N, lists, P]`` fp32 (`Operations.page_scores`).
        seq_lens: ``[N]`` int32, rising by one.
        admission: logical pages and their importance when the sequence began to decode.
    """

    scores: Tensor
    seq_lens: Tensor
    admission: tuple[Tensor, Tensor]


def cpu_ratios(
    operations: Operations,
    config: HybridConfig,
    decoded: Decoded,
    frames: int,
    intervals: Sequence[int],
    phase: int = 0,
) -> Tensor:
    """Simulate the residency of one layer with so many frames; ``phase``: index of the layer.

    The residency is the engine's own: the same operations in the order in which method ``scout`` runs them. Each
    interval is a row, so that all intervals are simulated on the same selections.

    Returns:
        ``[intervals, N]``: tokens attended on the CPU over tokens attended.
    """
    (steps, lists, pages), rows, page = decoded.scores.shape, len(intervals), config.page_size
    most = min(pages, max(config.budget_pages, frames))
    state = StepState.make(rows, pages, frames, min(config.budget_pages * lists, frames), 1, torch.device("cpu"))
    maps, copies = state.maps.of(0), state.copies.of(0)
    requests = torch.arange(rows, dtype=torch.int32)
    none, still = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    for index in range(rows):
        admitted, importance = decoded.admission
        own_frames = frames_for(maps, index, torch.full_like(admitted, -1))
        place(maps, index, admitted, own_frames, importance, torch.ones_like(admitted, dtype=torch.bool))
    table = requests.new_zeros(rows, pages)  # Host page ids are irrelevant, because no page is read.
    budgets = torch.full_like(requests, config.budget_pages)
    ratios = torch.zeros(rows, steps)
    for step in range(steps):
        seq_lens = decoded.seq_lens[step].expand(rows).int().contiguous()
        num_pages, ages = (seq_lens + page - 1) // page, torch.full_like(requests, step)
        operations.commit_pages(state.maps, state.copies, still)
        operations.open_pages(state.maps, requests, none, seq_lens - 1, page, config.sinks)
        scores = decoded.scores[step].expand(rows, -1, -1).contiguous()
        selected = operations.select_pages(
            scores, num_pages, seq_lens, budgets, requests, maps.frame_of, table, page, config.sinks, config.recent,
            most
        )  # fmt: skip
        on_cpu, on_device = selected.missing_listed.sum(1) * page, selected.tokens.sum(1)
        ratios[:, step] = on_cpu / (on_cpu + on_device)
        absent, listed, best = selected.absent, selected.missing_listed, scores
        if lists > 1:
            absent, listed, best = operations.union_pages(absent, listed, scores)
        sinks, recent = config.sinks, config.recent
        for row, interval in enumerate(intervals):
            one = slice(row, row + 1)
            operations.plan_recall(
                maps, copies.of(one), best[one], table[one], (selected.frames[one],
                selected.frames_listed[one]), (absent[one], listed[one]), num_pages[one], budgets[one],
                requests[one], none[one], ages[one], sinks, recent, interval, phase, state.keep[0],
            )  # fmt: skip
    return ratios
