"""Rows whose KV is not on the device tier (asynchronous overlap: APEX, arXiv 2506.03296, section 3.3).

Such a row asks the CPU workers in each layer. It waits for the answer inside the layer, or it is *parked*. The engine's
batch then carries the row along without a result until a later step reaches the same layer.

Engines run the layers of a step one after the other, so that a row cannot wait inside a layer without delaying all
other rows. It can wait from one step to the next. At the input of layer l the row's hidden state and residual are
saved, its K and V are appended, and its question is asked. Its output is 0, and the remaining layers of this step
compute nothing valid for it. When the next step reaches layer l, hidden state and residual are restored, and attention
returns the answer. The row goes on to layer l + 1, where it parks again. If the answer is missing, the row stays
parked for another step. A row yields its token in the step in which it passes the last layer. Until then the engine is
told that the row is unfinished. Rows that wait inside the layers pass all layers in one step.

Data on the device tier decides what a row does, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, sent
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.kernels.operations import FAILED, NOWHERE, Counters, RowStates
from hybrid_backend.methods.apex import rows as host_rows
from hybrid_backend.methods.apex.questions import Questions
from hybrid_backend.step.patience import Patience
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.state import StepInputs

_COUNTED = ("resident_pages", "missing_pages", "resident_tokens", "missing_tokens")
assert Counters._fields[: len(_COUNTED)] == _COUNTED


def parking_bytes(rows: int, hidden: int) -> int:
    """Return the bytes that `Parking` keeps on the device tier for ``rows`` requests."""
    return rows * (len(RowStates._fields) * 4 + 5 * 8) + (rows + 1) * 2 * hidden * 4


class Parking:
    """Rows of a step that are on the CPU. Row buffers have a row for each request that may run at once.

    Attributes:
        questions: transport of questions and answers.
        late_rows: parked rows whose answer was missing when a step reached their layer, since start.
        is_idle: no row of the open step is on the CPU.
        may_park: rows of the open step may park, or are parked.
    """

    def __init__(self, config: HybridConfig, tiers: Tiers, questions: Questions, hidden: int) -> None:
        """Allocate the row buffers. ``hidden`` is the width of the decoder layers' input; with 0 no row ever parks."""
        rows, device = tiers.frames.requests, tiers.device
        self.questions = questions
        self.late_rows = 0
        self.is_idle = True
        self.may_park = False
        self._deadline, self._page = config.workers.deadline_seconds, config.page_size
        self._patience = Patience(self._deadline)
        self._columns = torch.zeros(len(RowStates._fields), rows, dtype=torch.int32, device=device)
        self.rows = RowStates(*self._columns)
        self._first_rows = dict[int, tuple[RowStates, Tensor]]()  # States and counts by the number of rows.
        self._wide = torch.zeros(1 + len(_COUNTED), rows, dtype=torch.int64, device=device)
        self._slots, self._counts = self._wide[0], self._wide[1:]
        # Inputs of decoder layers per request; padding rows share the last entry. fp32 represents all values of bf16.
        self._saved = torch.zeros(rows + 1, 2, hidden, device=device)
        # `live` and `parked` of each row after the last layer, for the last STEPS steps, which the host reads late.
        self._published = torch.zeros(STEPS, rows, 2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._kernels: Any = host_rows
        if tiers.is_async:
            from hybrid_backend.kernels.triton import questions as kernels  # Triton is not on all platforms.

            self._kernels = kernels
        self.idle()
        self._layer_of: dict[int, int] = {}  # Layer in which each parked request waits.
        self._since: dict[int, float] = {}  # Time since which each parked request waits.

    @property
    def device_bytes(self) -> int:
        """Device memory of the rows and of the questions."""
        buffers = self._columns.nbytes + self._wide.nbytes + self._saved.nbytes
        return buffers + self.questions.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory for requests to the CPU workers."""
        return self.questions.host_bytes

    @property
    def parked_rows(self) -> int:
        """Number of parked requests."""
        return len(self._layer_of)

    def gauges(self) -> dict[str, float]:
        return {"hybrid_parked_rows": self.parked_rows, "hybrid_late_rows": self.late_rows}

    def is_settled(self, request: int) -> bool:
        """Tell whether a request, by its index, is between two tokens."""
        return request not in self._layer_of

    # --- between steps, on the host ---

    def begin(self, rows: DecodeRows, indices: list[int], on_cpu: Tensor, parks: bool, pages: Tensor) -> None:
        """Open a step.

        Args:
            rows: decode rows of the step.
            indices: request index of each row.
            on_cpu: ``[rows]`` bool on the host.
            parks: rows on the CPU overlap. If not, they wait inside the layers.
            pages: ``[rows]`` int32 host page of each row's new token, on the device tier.
        """
        count, capacity = rows.count, self._columns.shape[1]
        self.is_idle = not bool(on_cpu.any())
        whole = (rows.seq_lens - 1) // self._page  # The device attends the growing page.
        tail = rows.seq_lens - whole * self._page
        parked = torch.tensor([self._layer_of.get(index, NOWHERE) for index in indices])
        live = parked == NOWHERE
        self.may_park = bool((on_cpu * parks).any() or not live.all())
        columns = torch.zeros(self._columns.shape, dtype=torch.int32)
        states = RowStates(*columns)
        for state, values in (
            (states.on_cpu, on_cpu), (states.parks, on_cpu * parks), (states.parked, parked), (states.live, live),
            (states.asks, on_cpu & live), (states.whole, on_cpu * whole), (states.tail, on_cpu * tail),
            (states.device_tokens, ~on_cpu * rows.seq_lens),
        ):  # fmt: skip
            state[:count] = values
        states.stored.fill_(-1)
        wide = torch.zeros(len(self._wide), capacity, dtype=torch.int64)
        wide[0] = capacity
        wide[:, :count] = torch.stack([torch.tensor(indices), torch.ones_like(whole), whole, tail, whole * self._page])
        self.questions.begin(self._patience.seconds)
        self._columns.copy_(sent(columns, self._columns.device))
        stored, own = self.rows_of(count).stored, self.rows_of(count).live > 0
        stored.copy_(torch.where(own, pages, -1))
        self._wide.copy_(sent(wide, self._wide.device))

    def idle(self) -> None:
        """Make all rows padding."""
        self._columns.zero_()
        self.rows.stored.fill_(-1)
        self._wide.zero_()
        self._slots.fill_(self._columns.shape[1])

    def unfinished(self, number: int, rows: DecodeRows, indices: list[int]) -> list[int]:
        """Return the rows of step ``number`` that yield no token, because they parked. Waits for the device.

        Rows must have been allowed to park in that step (`may_park`).
        """
        if self._columns.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        unfinished_rows = []
        for r, (live, parked) in enumerate(self._published[number % STEPS, : rows.count].tolist()):
            index = indices[r]
            if live:
                self._layer_of.pop(index, None)
                continue
            unfinished_rows.append(r)
            if self._layer_of.get(index) == parked:
                self.late_rows += 1
            else:
                self._layer_of[index], self._since[index] = parked, time.monotonic()
        return unfinished_rows

    def failures(self, number: int, indices: list[int | None]) -> dict[int, WorkerError]:
        """Return the rows of step ``number`` that waited beyond the deadline or whose question failed, with the reason.

        Args:
            number: number of a step that the device has passed.
            indices: request index of each row; None for a request that is gone.
        """
        errors: dict[int, WorkerError] = {}
        for r, (live, parked) in enumerate(self._published[number % STEPS, : len(indices)].tolist()):
            if live:
                continue
            request, seconds = indices[r], time.monotonic()
            waits = 0.0 if request is None else seconds - self._since.get(request, seconds)
            if parked == FAILED:
                gone = WorkerError("a CPU worker failed on a question of a request that is gone")
                errors[r] = gone if request is None else self.questions.failure(request)
            elif parked == NOWHERE or waits > self._deadline:
                errors[r] = DeadlineError(
                    f"CPU workers did not answer a request on the CPU within workers.deadline_seconds={self._deadline}"
                )
        self._patience.note(is_missed=any(isinstance(error, DeadlineError) for error in errors.values()))
        return errors

    def release(self, request: int) -> None:
        self._layer_of.pop(request, None)
        self._since.pop(request, None)
        self.questions.forget(request)

    def close(self) -> None:
        self.questions.close()

    # --- the step, layer by layer ---

    def layer_input(self, layer: int, rows: DecodeRows, hidden: Tensor, residual: Tensor | None) -> None:
        """Restore the rows that parked at this layer in an earlier step, and save the rows that park in this step.

        ``hidden`` and ``residual`` are ``[tokens, hidden]`` of the batch, and are changed in place.
        """
        if not self._saved.shape[2]:
            return  # No row ever parks.
        tokens = None if rows.whole_batch else rows.tokens.to(hidden.device)
        self._kernels.move_inputs(
            self.rows_of(rows.count), layer, hidden, residual, tokens, self._slots[: rows.count], self._saved
        )

    def rows_of(self, count: int) -> RowStates:
        """Return the states of the first ``count`` rows."""
        return self._of(count)[0]

    def _of(self, count: int) -> tuple[RowStates, Tensor]:
        if count not in self._first_rows:
            self._first_rows[count] = self.rows.first(count), self._counts[:, :count]
        return self._first_rows[count]

    def stored(self, rows: int) -> Tensor:
        return self.rows_of(rows).stored

    def ask(self, layer: int, q: Tensor, inputs: StepInputs) -> None:
        """Ask the workers for the rows on the CPU that reach this layer. ``q`` is ``[rows, heads, head_dim]``."""
        self.questions.ask(layer, q, self.rows_of(len(q)), inputs)

    def take(self, layer: int, inputs: StepInputs, counters: Tensor) -> tuple[Tensor, Tensor]:
        """Return the answers of rows that wait, and of rows that parked at this layer in an earlier step.

        Rows with an answer go on with the next layer.
        """
        rows, counts = self._of(len(inputs.requests))
        try:
            return self.questions.take(layer, rows, inputs, counts, counters)
        except DeadlineError:
            self._patience.note(is_missed=True)
            raise

    def end(self, number: Tensor) -> None:
        """Publish the places of the rows after the last layer. ``number`` is `StepInputs.number`."""
        self._kernels.publish(self.rows, number, self._published)
