"""What CPU workers attend for whole requests: one question at a time of each, taken when its answer is there, perhaps
some steps later. (`partials` is for questions that every row asks in every step, and waits for.)"""

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
    """Empty partials (output 0, lse -inf) in rows that have none."""

    ready: Tensor  # [rows] bool
    failed: Tensor  # [rows] bool: the workers could not compute it
    out: Tensor  # [rows, heads, head_dim] fp32
    lse: Tensor  # [rows, heads] fp32
    waited: Tensor  # [] int64 nanoseconds, of all rows together


class Questions(Protocol):
    """``wanted``: ``[rows]`` bool on the device tier; ``now``: of as many rows."""

    def ask(self, layer: int, q: Tensor, wanted: Tensor, whole: Tensor, now: StepInputs) -> None:
        """Attention of ``q`` ``[rows, heads, head_dim]`` over the first ``whole`` ``[rows]`` int32 pages of the wanted
        rows, which are whole. Returns at once."""

    def take(self, layer: int, wanted: Tensor, waits: Tensor, now: StepInputs) -> Answers:
        """The answers of the wanted rows to what they asked last. ``waits``: ``[rows]`` bool: those that are waited
        for, until the deadline.

        Raises:
            WorkerError: the workers failed, or were late, for a row that waits, and the caller can be told.
        """

    def begin(self) -> None:
        """A step begins: all waits of a row in it are together no longer than the deadline."""

    def failure(self, request: int) -> WorkerError:
        """Why the request's answer `failed`, of the last one that did."""

    def forget(self, request: int) -> None:
        """The request is gone."""

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    def close(self) -> None: ...


class PoolQuestions:
    """A job of the worker pool for each; the device tier is the host."""

    device_bytes = host_bytes = 0

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool) -> None:
        self._model, self._tiers, self._workers = model, tiers, workers
        self._deadline, self._page = config.workers.deadline_seconds, config.page_size
        self._tickets: dict[int, Ticket] = {}  # by request; none: it asked for no page
        self._failed: dict[int, WorkerError] = {}

    def ask(self, layer: int, q: Tensor, wanted: Tensor, whole: Tensor, now: StepInputs) -> None:
        generation = self._tiers.frames.generation
        for r in wanted.nonzero().flatten().tolist():
            request, count = int(now.requests[r]), int(whole[r])
            self.forget(request)
            if not count:
                continue
            pages = PageList(now.table[r, :count].long().view(1, 1, -1), torch.full((1, 1, count), self._page))
            index = torch.tensor([request])
            self._tickets[request] = self._workers.submit(
                q[r : r + 1].clone(), self._tiers.host.layers[layer], pages, self._model.scale, f"layer {layer}",
                Owners(index, generation[index], generation),
            )  # fmt: skip

    def take(self, layer: int, wanted: Tensor, waits: Tensor, now: StepInputs) -> Answers:
        rows, began = len(wanted), time.perf_counter()
        ready, failed = torch.zeros(2, rows, dtype=torch.bool)
        out = torch.zeros(rows, self._model.num_heads, self._model.head_dim)
        lse = torch.full((rows, self._model.num_heads), float("-inf"))
        for r in wanted.nonzero().flatten().tolist():
            request = int(now.requests[r])
            ticket = self._tickets.get(request)
            if ticket is not None:
                if not waits[r] and not ticket.done():
                    continue
                try:
                    partial = ticket.wait(self._deadline)
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

    def begin(self) -> None:
        """Each wait has the deadline for itself."""

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
    """Questions through pinned memory, asked and taken by kernels in the device's stream.

    Raises:
        ConfigError: the workers' kernel is not the native one, which alone serves boxes.
    """

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, columns: int) -> None:
        if not isinstance(workers, NativePool):
            raise ConfigError("workers.kernel: device_kernels: triton needs the native kernel; write auto or native")
        from hybrid_backend.kernels.triton import questions  # late: Triton is not everywhere

        self._kernels = questions
        self._allowed = round(config.workers.deadline_seconds * 1e9)  # nanoseconds
        layers = {layer: tiers.host.layers[layer] for layer in tiers.layout.full_layers(model)}
        requests = tiers.frames.requests
        self.boxes = QuestionBoxes(workers.native, layers, model.num_heads, requests, columns, model.scale)
        self._numbers, self._ready, self._out, self._lse, self._time_left, self._waited = _buffers(
            requests, model, tiers.device
        )

    def begin(self) -> None:
        self._time_left.fill_(self._allowed)

    def ask(self, layer: int, q: Tensor, wanted: Tensor, whole: Tensor, now: StepInputs) -> None:
        position = self.boxes.position[layer]
        self._kernels.ask_rows(self.boxes, q, now.table, whole, now.requests, wanted.int(), position, self._numbers)

    def take(self, layer: int, wanted: Tensor, waits: Tensor, now: StepInputs) -> Answers:
        rows = len(wanted)
        ready, out, lse = self._ready[:rows], self._out[:rows], self._lse[:rows]
        left, waited = self._time_left[:rows], self._waited[:rows].zero_()
        allowed = torch.where(waits, left, 0)
        self._kernels.take_rows(
            self.boxes, now.requests, wanted.int(), self._numbers, out, lse, ready, waited, allowed, wait=True
        )
        left.copy_(torch.where(waits, allowed, left))
        return Answers(ready > 0, ready < 0, out, lse, (waited * waits).max())

    def failure(self, request: int) -> WorkerError:
        return WorkerError(self.boxes.failure(request))

    def forget(self, request: int) -> None:
        """What it asked may still be answered, into its own box; the next question has another number."""

    @property
    def device_bytes(self) -> int:
        return sum(x.nbytes for x in (self._numbers, self._ready, self._out, self._lse, self._time_left, self._waited))

    @property
    def host_bytes(self) -> int:
        return self.boxes.nbytes

    def close(self) -> None:
        self.boxes.close()


def box_bytes(model: ModelSpec, requests: int, columns: int) -> tuple[int, int]:
    """``(device, host)`` memory of `BoxQuestions`."""
    buffers = _buffers(requests, model, torch.device("meta"))
    host = question_bytes(requests, columns, model.num_heads, model.head_dim, model.dtype.itemsize)
    return sum(x.nbytes for x in buffers), host


def _buffers(requests: int, model: ModelSpec, device: torch.device) -> tuple[Tensor, ...]:
    """Numbers, ready, out, lse, time left, waited."""
    heads, dim = model.num_heads, model.head_dim
    shapes = [((), torch.int32), ((), torch.int32), ((heads, dim), torch.float32), ((heads,), torch.float32)]
    shapes += [((), torch.int64), ((), torch.int64)]
    return tuple(torch.zeros((requests, *shape), dtype=dtype, device=device) for shape, dtype in shapes)
