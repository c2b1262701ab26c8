"""The inputs of a decode step, as they are written to the device tier."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, sent
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.epochs import SelectionEpochs
from hybrid_backend.tiers import Tiers


class InputWriter:
    """Writes the `StepInputs` of each step: all small inputs in one copy, and the block table in another."""

    def __init__(self, config: HybridConfig, tiers: Tiers, buffers: StepBuffers) -> None:
        self._config, self._tiers, self._buffers = config, tiers, buffers
        requests = tiers.frames.requests
        self._ages = [0] * requests
        """Number of decode steps that each running request has run, by request index (`FramePool.index`)."""
        self.pages_of_index = [0] * requests
        """Number of pages of each running request, by request index (`FramePool.index`)."""
        steps = buffers.shape.selection_steps
        self._epochs = SelectionEpochs(steps, requests) if steps > 1 else None
        self.written_pages = torch.zeros(STEPS, requests, dtype=torch.int32, pin_memory=tiers.device.type == "cuda")
        """``[STEPS, requests]`` int32 on the host: host page that each row of the last ``STEPS`` steps wrote to."""

    def write(self, number: int, rows: DecodeRows, indices: list[int], budgets: Tensor, sampled: Tensor | None) -> None:
        """Write the inputs of a step, without waiting for the device.

        Args:
            number: number of the step (`StepInputs.number`).
            rows: decode rows of the step.
            indices: request index of each row (`FramePool.index`).
            budgets: ``[rows]`` int64 pages that a layer attends on average.
            sampled: row that each layer samples, on the host (`StepInputs.sampled`); None: no layer is sampled.
        """
        inputs, count = self._buffers.inputs, rows.count
        requests = torch.tensor(indices)
        epochs = torch.zeros_like(requests)
        if self._epochs is not None:
            epochs = self._epochs.of_rows(number, requests, rows.seq_lens, rows.num_pages, budgets)
        columns = {
            "num_pages": rows.num_pages, "seq_lens": rows.seq_lens, "positions": rows.seq_lens - 1,
            "requests": requests, "budgets": budgets, "ages": torch.tensor([self._ages[index] for index in indices]),
            # The generations on the host belong to this step, while the device may still run earlier steps.
            "generations": self._tiers.frames.generation[requests],
            "epochs": epochs,
        }  # fmt: skip
        host_inputs = torch.zeros(inputs.small.shape, dtype=torch.int32)
        by_row, by_layer, number_input = inputs.split_small(host_inputs, self._buffers.shape.rows, len(inputs.sampled))
        for position, name in enumerate(inputs.PER_ROW):
            by_row[position, :count] = columns[name]
        if self._buffers.layer_budgets is not None:
            by_row[len(inputs.PER_ROW) :, :count] = self._buffers.layer_budgets.of_rows(budgets, rows.num_pages)
        if sampled is not None:
            by_layer.copy_(sampled)
        number_input.fill_(number)
        inputs.small.copy_(sent(host_inputs, inputs.small.device))
        inputs.table[:count, : rows.page_table.shape[1]].copy_(rows.page_table)
        inputs.pages.fill_(-1)
        inputs.pages[:count].copy_(rows.page_table.gather(1, inputs.num_pages[:count, None].long() - 1)[:, 0])
        self.written_pages[number % STEPS].copy_(inputs.pages, non_blocking=True)
        for index in indices:
            self._ages[index] += 1

    def defer_recall(self, index: int) -> None:
        """Let a request recall at each layer's interval, and not in all layers in its first step.

        A request of which no page is on the device would copy its whole selection in that step.
        """
        self._ages[index] = 1

    def clear(self) -> None:
        """Make all rows padding rows."""
        # The step number stays, so that a replayed CUDA graph does not wait for a result that never comes.
        self._buffers.inputs.small[:-1].zero_()
        self._buffers.inputs.pages.fill_(-1)

    def release(self, index: int) -> None:
        """Forget the request with this index."""
        self._ages[index] = self.pages_of_index[index] = 0
        self.select_again([index])

    def select_again(self, indices: Iterable[int | None]) -> None:
        """Let requests select their pages in their next step, whatever they attended before; None: a gone request."""
        if self._epochs is not None:
            for index in indices:
                if index is not None:
                    self._epochs.end(index)
