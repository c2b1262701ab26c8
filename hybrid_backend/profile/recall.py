"""The share of a layer's attended tokens that the CPU computes, step by step, for every recall interval at once.

Residency is the engine's own class, driven in the order in which `methods/selective.py` and `methods/scout.py` drive
it; one region per interval, so that all are simulated on the same selections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_backend.tiers.residency import Residency

NEVER = 0
"""The "interval" of a simulation without recall."""


@dataclass(frozen=True)
class Decoded:
    """What one layer selected over consecutive decode steps of one sequence. N steps, P pages at the end.

    ``chosen``: ``[N, lists, P]`` bool; ``scores``: ``[N, P]``, inf for pages that are always attended, -inf for pages
    that do not exist yet; ``seq_lens``: ``[N]``, each one more than the last.
    """

    chosen: Tensor
    scores: Tensor
    seq_lens: Tensor
    page_size: int


def cpu_ratios(decoded: Decoded, slots: int, intervals: Sequence[int], phase: int = 0) -> Tensor:
    """Simulate the residency of one layer.

    Args:
        decoded: the layer's selections.
        slots: pages that stay on the device.
        intervals: decode steps between recalls; `NEVER` for none.
        phase: the layer's index: layers take turns.

    Returns:
        ``[intervals, N]``: tokens attended on the CPU over tokens attended. Slots are filled at the first step, as
        after a prompt, so it starts at zero unless the selection does not fit.
    """
    steps, _, pages = decoded.chosen.shape
    residency = Residency([0], len(intervals), slots)
    regions = torch.arange(len(intervals))
    num_pages = -(-decoded.seq_lens // decoded.page_size)
    first = decoded.scores[0, : int(num_pages[0])]
    best = first.topk(min(slots, len(first))).indices
    for region in range(len(intervals)):
        residency.put(0, region, torch.arange(len(best)), best, first[best])
    tokens = torch.full((steps, pages), float(decoded.page_size))
    tokens[torch.arange(steps), num_pages - 1] = (decoded.seq_lens - (num_pages - 1) * decoded.page_size).float()
    ratios = torch.zeros(len(intervals), steps)
    for step in range(steps):
        if step and num_pages[step] > num_pages[step - 1]:
            for region in range(len(intervals)):
                residency.open_page(region, int(num_pages[step]) - 1)
        scores, chosen = decoded.scores[step], decoded.chosen[step]
        residency.note_scores(0, regions, scores[None].expand(len(intervals), -1))
        missing = chosen[None] & (residency.slot_of(0, regions, pages) < 0)[:, None]
        attended = (chosen * tokens[step]).sum()
        ratios[:, step] = (missing * tokens[step]).sum((1, 2)) / attended
        for region, interval in enumerate(intervals):
            if interval != NEVER and (step + phase) % interval == 0:
                _copy_in(residency, region, missing[region].any(0), chosen.any(0), scores)
    return ratios


def _copy_in(residency: Residency, region: int, missing: Tensor, chosen: Tensor, scores: Tensor) -> None:
    wanted = missing.nonzero().flatten()
    if not len(wanted):
        return
    wanted = wanted[scores[wanted].argsort(descending=True)]
    local = residency.victims(0, region, chosen.nonzero().flatten(), len(wanted))
    wanted = wanted[: len(local)]
    residency.put(0, region, local, wanted, scores[wanted])
