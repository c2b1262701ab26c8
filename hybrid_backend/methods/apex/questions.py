"""Questions of whole requests to the CPU workers, one at a time per request.

An answer is taken when it has arrived, perhaps some steps later. (`step.cpu_attention` serves rows that ask in each
step and wait for the answer.)
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList
from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.kernels.cpu.mailbox import QuestionBoxes, question_bytes
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.state import StepInputs
from hybrid_backend.workers import NativePool, Owners, Ticket, WorkerPool


class Answers(NamedTuple):
    """Answers of the workers; a row without an answer has an empty partial (output 0, lse -inf).

    Attributes:
        ready: ``[rows]`` bool; the row has an answer.
        failed: ``[rows]`` bool; the workers could not compute the answer.
        out: ``[rows, heads, head_dim]`` fp32.
        lse: ``[rows, heads]`` fp32.
        waited: ``[]`` int64 nanoseconds of all rows together.
    """

    ready: Tensor
    failed: Tensor
    out: Tensor
    lse: Tensor
    waited: Tensor


class Questions(Protocol):
    """Transport of questions and answers between the device tier and the CPU workers."""

    def ask(self, layer: int, q: Tensor, mask: Tensor, whole: Tensor, inputs: StepInputs) -> None:
        """Ask for attention over the first pages of some rows. Returns at once.

        Args:
            layer: layer of the model.
            q: ``[rows, heads, head_dim]``.
            mask: ``[rows]`` bool on the device tier; the rows that ask.
            whole: ``[rows]`` int32 number of pages, all of which are full.
            inputs: inputs of the step for as many rows.
        """

    def take(self, layer: int, mask: Tensor, waits: Tensor, inputs: StepInputs) -> Answers:
        """Return the answers of some rows to their last questions.

        Args:
            layer: layer of the model.
            mask: ``[rows]`` bool on the device tier; the rows that take an answer.
            waits: ``[rows]`` bool; the rows whose answers are waited for, until the deadline.
            inputs: inputs of the step for as many rows.

        Raises:
            WorkerError: the workers failed, or were late, for a row that waits, and the caller can be told.
        """

    def begin(self, seconds: float) -> None:
        """Begin a step. All waits of one row in it last no longer than ``seconds`` together."""

    def failure(self, request: int) -> WorkerError:
        """Return the reason of the request's last answer that failed."""

    def forget(self, request: int) -> None:
        """Forget a request that is gone."""

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    def close(self) -> None: ...


class PoolQuestions:
    """Questions as jobs of the worker pool, where the device tier is the host."""

    device_bytes = host_bytes = 0

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool) -> None:
        self._model, self._tiers, self._workers = model, tiers, workers
        self._seconds, self._page = config.workers.deadline_seconds, config.page_size
        self._tickets: dict[int, Ticket] = {}  # Keyed by request; a question about no page has no ticket.
        self._failed: dict[int, WorkerError] = {}

    def ask(self, layer: int, q: Tensor, mask: Tensor, whole: Tensor, inputs: StepInputs) -> None:
        generation = self._tiers.frames.generation
        for r in mask.nonzero().flatten().tolist():
            request, count = int(inputs.requests[r]), int(whole[r])
            self.forget(request)
            if not count:
                continue
            pages = PageList(inputs.table[r, :count].long().view(1, 1, -1), torch.full((1, 1, count), self._page))
            index = torch.tensor([request])
            self._tickets[request] = self._workers.submit(
                q[r : r + 1].clone(), self._tiers.host.layers[layer], pages, self._model.scale, f"layer {layer}",
                Owners(index, generation[index], generation),
            )  # fmt: skip

    def take(self, layer: int, mask: Tensor, waits: Tensor, inputs: StepInputs) -> Answers:
        rows, began = len(mask), time.perf_counter()
        ready, failed = torch.zeros(2, rows, dtype=torch.bool)
        out = torch.zeros(rows, self._model.num_heads, self._model.head_dim)
        lse = torch.full((rows, self._model.num_heads), float("-inf"))
        for r in mask.nonzero().flatten().tolist():
            request = int(inputs.requests[r])
            ticket = self._tickets.get(request)
            if ticket is not None:
                if not waits[r] and not ticket.done():
                    continue
                try:
                    partial = ticket.wait(self._seconds)
                except WorkerError as error:
                    if waits[r]:
                        raise
                    self._failed[request], failed[r] = error, True
                    continue
                del self._tickets[request]
                out[r], lse[r] = partial.out[0], partial.lse[0]
            ready[r] = True
        waited = round((time.perf_counter() - began) * 1e9) if bool(waits.any()) else 0
        return Answers(ready, failed, out, lse, torch.tensor(waited))

    def begin(self, seconds: float) -> None:
        """Begin a step, each of whose waits lasts no longer than ``seconds``."""
        self._seconds = seconds

    def failure(self, request: int) -> WorkerError:
        return self._failed[request]

    def forget(self, request: int) -> None:
        self._failed.pop(request, None)
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            ticket.abandon()

    def close(self) -> None:
        for request in list(self._tickets):
            self.forget(request)


class BoxQuestions:
    """Questions through pinned memory, asked and taken by kernels in the device's stream."""

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, columns: int) -> None:
        """Open the boxes of all requests.

        Raises:
            ConfigError: the workers do not run the native kernel, which alone serves boxes.
        """
        if not isinstance(workers, NativePool):
            raise ConfigError("workers.kernel: device_kernels: triton needs the native kernel; write auto or native")
        from hybrid_backend.kernels.triton import questions  # Imported late, because Triton is not on all platforms.

        self._kernels = questions
        layers = {layer: tiers.host.layers[layer] for layer in tiers.layout.full_layers(model)}
        requests = tiers.frames.requests
        self.boxes = QuestionBoxes(workers.native, layers, model.num_heads, requests, columns, model.scale)
        self._numbers, self._ready, self._out, self._lse, self._time_left, self._waited = _buffers(
            requests, model, tiers.device
        )

    def begin(self, seconds: float) -> None:
        self._time_left.fill_(round(seconds * 1e9))  # Nanoseconds.

    def ask(self, layer: int, q: Tensor, mask: Tensor, whole: Tensor, inputs: StepInputs) -> None:
        position = self.boxes.position[layer]
        self._kernels.ask_rows(self.boxes, q, inputs.table, whole, inputs.requests, mask.int(), position, self._numbers)

    def take(self, layer: int, mask: Tensor, waits: Tensor, inputs: StepInputs) -> Answers:
        rows = len(mask)
        ready, out, lse = self._ready[:rows], self._out[:rows], self._lse[:rows]
        left, waited = self._time_left[:rows], self._waited[:rows].zero_()
        allowed = torch.where(waits, left, 0)
        self._kernels.take_rows(
            self.boxes, inputs.requests, mask.int(), self._numbers, out, lse, ready, waited, allowed, wait=True
        )
        left.copy_(torch.where(waits, allowed, left))
        return Answers(ready > 0, ready < 0, out, lse, (waited * waits).max())

    def failure(self, request: int) -> WorkerError:
        return WorkerError(self.boxes.failure(request))

    def forget(self, request: int) -> None:
        """Do nothing: a late answer goes to the request's own box, and the next question has another number."""

    @property
    def device_bytes(self) -> int:
        return sum(x.nbytes for x in (self._numbers, self._ready, self._out, self._lse, self._time_left, self._waited))

    @property
    def host_bytes(self) -> int:
        return self.boxes.nbytes

    def close(self) -> None:
        self.boxes.close()


def box_bytes(model: ModelSpec, requests: int, columns: int) -> tuple[int, int]:
    """Return the bytes of device and host memory of `BoxQuestions`."""
    buffers = _buffers(requests, model, torch.device("meta"))
    host = question_bytes(requests, columns, model.num_heads, model.head_dim, model.dtype.itemsize)
    return sum(x.nbytes for x in buffers), host


def _buffers(requests: int, model: ModelSpec, device: torch.device) -> tuple[Tensor, ...]:
    """Return the buffers for numbers, ready flags, outputs, LSEs, time left and time waited."""
    heads, dim = model.num_heads, model.head_dim
    shapes = [((), torch.int32), ((), torch.int32), ((heads, dim), torch.float32), ((heads,), torch.float32)]
    shapes += [((), torch.int64), ((), torch.int64)]
    return tuple(torch.zeros((requests, *shape), dtype=dtype, device=device) for shape, dtype in shapes)
