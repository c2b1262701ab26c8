"""Questions of whole requests to the CPU workers, one at a time per request.

An answer is taken when it has arrived, perhaps some steps later. (`step.cpu_attention` serves rows that ask in each
step and wait for the answer.)
"""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList
from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.kernels.cpu.mailbox import QueryShape, QuestionBoxes, question_bytes
from hybrid_backend.kernels.operations import Counters, RowStates
from hybrid_backend.methods.apex.rows import settle
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.state import StepInputs
from hybrid_backend.workers import NativePool, Owners, Ticket, WorkerPool

_WAITED = Counters._fields.index("waited")


class Questions(Protocol):
    """Transport of questions and answers between the device tier and the CPU workers."""

    def ask(self, layer: int, q: Tensor, rows: RowStates, inputs: StepInputs) -> None:
        """Ask for attention over the whole pages of the rows that ask. Returns at once.

        Args:
            layer: layer of the model.
            q: ``[rows, heads, head_dim]``.
            rows: states of the rows.
            inputs: inputs of the step for as many rows.
        """

    def take(
        self, layer: int, rows: RowStates, inputs: StepInputs, counts: Tensor, counters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take the answers of rows that wait, and of rows that parked at this layer, and settle all rows.

        Args:
            layer: layer of the model.
            rows: states of the rows, updated in place.
            inputs: inputs of the step for as many rows.
            counts: ``[4, rows]`` int64 pages and tokens to count for each row with an answer.
            counters: counters of the layer (`operations.Counters`).

        Returns:
            Partials ``[rows, heads, head_dim]`` and ``[rows, heads]`` fp32, empty (0 and -inf) without an answer.

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

    def ask(self, layer: int, q: Tensor, rows: RowStates, inputs: StepInputs) -> None:
        generation = self._tiers.frames.generation
        for r in rows.asks.nonzero().flatten().tolist():
            request, count = int(inputs.requests[r]), int(rows.whole[r])
            self.forget(request)
            if not count:
                continue
            pages = PageList(inputs.table[r, :count].long().view(1, 1, -1), torch.full((1, 1, count), self._page))
            index = torch.tensor([request])
            self._tickets[request] = self._workers.submit(
                q[r : r + 1].clone(), self._tiers.host.layers[layer], pages, self._model.scale, f"layer {layer}",
                Owners(index, generation[index], generation),
            )  # fmt: skip

    def take(
        self, layer: int, rows: RowStates, inputs: StepInputs, counts: Tensor, counters: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, began = len(rows.asks), time.perf_counter()
        waits = rows.parks == 0
        takes = (rows.asks > 0) & waits | (rows.parked == layer)
        ready, failed = torch.zeros(2, count, dtype=torch.bool)
        out = torch.zeros(count, self._model.num_heads, self._model.head_dim)
        lse = torch.full((count, self._model.num_heads), float("-inf"))
        for r in takes.nonzero().flatten().tolist():
            request = int(inputs.requests[r])
            ticket = self._tickets.get(request)
            if ticket is not None:
                if not waits[r] and not self.has_arrived(request, ticket):
                    continue
                try:
                    answer = ticket.wait(self._seconds)
                except WorkerError as error:
                    if waits[r]:
                        raise
                    self._failed[request], failed[r] = error, True
                    continue
                del self._tickets[request]
                out[r], lse[r] = answer.out[0], answer.lse[0]
            ready[r] = True
        if bool((takes & waits).any()):
            counters[_WAITED] += round((time.perf_counter() - began) * 1e9)
        counters[: len(counts)] += (counts * ready).sum(1)
        settle(rows, layer, ready, failed, inputs.pages)
        return out, lse

    def has_arrived(self, request: int, ticket: Ticket) -> bool:
        """Tell whether the answer to a request's question is there, so that a row that does not wait takes it."""
        return ticket.done()

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
        queries = QueryShape(model.num_heads, model.dtype)
        self.boxes = QuestionBoxes(workers.native, layers, queries, requests, columns, model.scale)
        self._buffers = _buffers(requests, model, tiers.device)

    def begin(self, seconds: float) -> None:
        self._buffers.time_left.fill_(round(seconds * 1e9))  # Nanoseconds.

    def ask(self, layer: int, q: Tensor, rows: RowStates, inputs: StepInputs) -> None:
        self._kernels.ask_rows(
            self.boxes, q, inputs.table, rows.whole, inputs.requests, rows.asks, self.boxes.position[layer],
            self._buffers.numbers,
        )  # fmt: skip

    def take(
        self, layer: int, rows: RowStates, inputs: StepInputs, counts: Tensor, counters: Tensor
    ) -> tuple[Tensor, Tensor]:
        buffers, count = self._buffers, len(rows.asks)
        out, lse = buffers.out[:count], buffers.lse[:count]
        self._kernels.take_rows(
            self.boxes, layer, inputs.requests, rows, inputs.pages, buffers.numbers, out, lse, buffers.waited,
            buffers.time_left, counts, buffers.arrived, counters,
        )  # fmt: skip
        return out, lse

    def failure(self, request: int) -> WorkerError:
        return WorkerError(self.boxes.failure(request))

    def forget(self, request: int) -> None:
        """Do nothing: a late answer goes to the request's own box, and the next question has another number."""

    @property
    def device_bytes(self) -> int:
        return sum(x.nbytes for x in self._buffers)

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


class _Buffers(NamedTuple):
    """Buffers of `BoxQuestions` on the device tier; ``[requests]`` where nothing else is said.

    Attributes:
        numbers: int32 number of each request's last question.
        out: ``[requests, heads, head_dim]`` fp32 answers of a layer's rows.
        lse: ``[requests, heads]`` fp32.
        time_left: int64 nanoseconds that each row may still wait in this step.
        waited: int64 scratch.
        arrived: ``[1]`` int32 scratch.
    """

    numbers: Tensor
    out: Tensor
    lse: Tensor
    time_left: Tensor
    waited: Tensor
    arrived: Tensor


def _buffers(requests: int, model: ModelSpec, device: torch.device) -> _Buffers:
    heads, zeros = model.num_heads, partial(torch.zeros, device=device)
    return _Buffers(
        numbers=zeros(requests, dtype=torch.int32),
        out=zeros(requests, heads, model.head_dim),
        lse=zeros(requests, heads),
        time_left=zeros(requests, dtype=torch.int64),
        waited=zeros(requests, dtype=torch.int64),
        arrived=zeros(1, dtype=torch.int32),
    )
