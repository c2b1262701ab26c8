"""Functions that settle, save and publish rows on the CPU, in plain torch, where the device tier is the host.

On a GPU, kernels do the same in one launch each (`kernels.triton.questions`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels.operations import FAILED, NOWHERE, RowStates


def settle(rows: RowStates, layer: int, ready: Tensor, failed: Tensor, pages: Tensor) -> None:
    """Let the rows with an answer go on with the next layer, and park the others.

    Args:
        rows: states of the rows, updated in place.
        layer: layer of the model.
        ready: ``[rows]`` bool; the row has an answer.
        failed: ``[rows]`` bool; the workers could not compute the answer.
        pages: ``[rows]`` int32 host page of each row's new token.
    """
    stays = torch.where(failed, FAILED, rows.parked)
    stays = torch.where((rows.asks > 0) & (rows.parks > 0), layer, stays)
    rows.parked.copy_(torch.where(ready, NOWHERE, stays))
    rows.live.copy_(torch.where(rows.on_cpu > 0, ready.int(), rows.live))
    rows.asks.copy_(rows.on_cpu * rows.live)
    rows.stored.copy_(torch.where(rows.live > 0, pages, -1))
    rows.growing.copy_(rows.tail * ready)


def move_inputs(
    rows: RowStates, layer: int, hidden: Tensor, residual: Tensor | None, tokens: Tensor | None, slots: Tensor,
    saved: Tensor,
) -> None:  # fmt: skip
    """Restore the layer inputs of rows that parked at this layer, and save those of rows that park in this step.

    Args:
        rows: states of the rows.
        layer: layer of the model.
        hidden: ``[tokens, hidden]`` input of the layer, changed in place.
        residual: like ``hidden``; None: the layer has no such input.
        tokens: ``[rows]`` int64 place of each row in the batch; None: the rows are the batch's first tokens.
        slots: ``[rows]`` int64 slot of each row in ``saved``.
        saved: ``[slots, 2, hidden]`` fp32 inputs of parked rows.
    """
    count = len(slots)
    restores, saves = rows.parked == layer, rows.live * rows.parks > 0
    for part, x in enumerate((hidden, residual)):
        if x is None:
            continue
        places = torch.arange(count) if tokens is None else tokens
        x[places[restores]] = saved[slots[restores], part].to(x.dtype)
        saved[slots[saves], part] = x[places[saves]].float()


def publish(rows: RowStates, number: Tensor, published: Tensor) -> None:
    """Write `live` and `parked` of all rows to ``published`` ``[steps, rows, 2]`` on the host, for step ``number``."""
    published[int(number) % len(published)] = torch.stack([rows.live, rows.parked], 1)
