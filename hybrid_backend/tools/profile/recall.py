"""Simulation of the share of a layer's attended tokens that the CPU computes, for every recall interval at once.

The residency is the engine's own: the same operations in the order in which method ``scout`` runs them. Each interval
is a row, so that all intervals are simulated on the same selections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig
from hybrid_backend.execution.admission import place
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.state import StepState

NEVER = 0
"""Interval that stands for a simulation without recall."""


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
    """Simulate the residency of one layer.

    Args:
        operations: implementation of the operations.
        config: page size, budget, sinks and recent pages.
        decoded: inputs of the decode steps.
        frames: pages that stay on the device.
        intervals: decode steps between recalls; `NEVER` for none.
        phase: index of the layer; layers recall in different steps.

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
        place(maps, index, *decoded.admission)
    table = requests.new_zeros(rows, pages)  # no page is ever read
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
            if interval == NEVER:
                operations.note_scores(maps, best[one], num_pages[one], budgets[one], requests[one], sinks, recent)
                continue
            operations.plan_recall(
                maps, copies.of(one), best[one], table[one], (selected.frames[one],
                selected.frames_listed[one]), (absent[one], listed[one]), num_pages[one], budgets[one],
                requests[one], none[one], ages[one], sinks, recent, interval, phase, state.keep[0],
            )  # fmt: skip
    return ratios
