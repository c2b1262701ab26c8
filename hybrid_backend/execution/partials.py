"""Partials that CPU workers compute: asked for in one layer, awaited in a later one.

Where the device tier is the host, a question is a job of the worker pool. A GPU asks by itself, through mailboxes in
pinned memory: nothing of it passes through Python, so a CUDA graph holds both the question and the wait.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError, DeadlineError, WorkerError
from hybrid_backend.kernels.cpu import STEPS, Mailboxes
from hybrid_backend.kernels.operations import Counters
from hybrid_backend.step import ModelSpec
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.sizes import StepShape
from hybrid_backend.tiers.state import StepInputs
from hybrid_backend.workers import NativePool, Owners, Ticket, WorkerPool

_WAITED, _AHEAD = Counters._fields.index("waited"), Counters._fields.index("ahead")


class CpuPartials(Protocol):
    """What a decode step asks the CPU workers for. Lists of pages hold whole ones."""

    def begin(self, inputs: StepInputs, rows: int) -> None:
        """A step of ``rows`` rows begins; ``inputs`` are written."""

    def mailbox(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Where workers look for a layer's missing pages (`Operations.select_pages`); None: they are handed over."""

    def ask(
        self, layer: int, q: Tensor, missing: Tensor | None, listed: Tensor, is_told: bool, number: Tensor,
        counters: Tensor,
    ) -> None:  # fmt: skip
        """Attention of ``q`` ``[rows, heads, head_dim]`` over listed host pages (`Selection.missing`). None: over what
        the layer's context cache holds of each row; it holds nothing where nothing is ``listed``. ``is_told``: the
        lists are in the mailbox already. Returns at once."""

    def answer(self, layer: int, rows: int, number: Tensor, counters: Tensor) -> tuple[Tensor, Tensor] | None:
        """``(out [rows, heads, head_dim], lse [rows, heads] fp32)``, when it is there; None: there was nothing to ask.

        Raises:
            WorkerError: the workers failed, or were late, and the caller can be told (not from inside a stream).
        """

    def failure(self, number: int) -> WorkerError | None:
        """What went wrong in the step of this `StepInputs.number`, which the device has passed, but not long ago."""

    def abandon(self) -> None:
        """Forget what was asked in the open step."""

    @property
    def host_bytes(self) -> int: ...

    def close(self) -> None: ...


class PoolPartials:
    """Questions as jobs of a worker pool; the device tier is the host."""

    host_bytes = 0

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool) -> None:
        self._workers, self._tiers = workers, tiers
        self._deadline, self._page, self._scale = config.workers.deadline_seconds, config.page_size, model.scale
        self._owners: Owners | None = None
        self._tickets: dict[int, Ticket] = {}

    def begin(self, inputs: StepInputs, rows: int) -> None:
        generation = self._tiers.frames.generation
        requests = inputs.requests[:rows].long()
        self._owners = Owners(requests, generation[requests], generation)

    def mailbox(self, layer: int) -> None:
        return None

    def ask(
        self, layer: int, q: Tensor, missing: Tensor | None, listed: Tensor, is_told: bool, number: Tensor,
        counters: Tensor,
    ) -> None:  # fmt: skip
        if missing is None:
            assert self._owners is not None
            cache = self._tiers.cache
            lists = cache.lists(layer, self._owners.requests.tolist())
            if lists.ids.shape[2]:
                self._submit(layer, q, cache.stores[layer], lists)
            return
        longest = int(listed.max()) if listed.numel() else 0
        if longest:
            valid = torch.where(torch.arange(longest) < listed[..., None], self._page, 0)
            pages = PageList(missing[..., :longest].long().masked_fill_(valid == 0, -1), valid)
            self._submit(layer, q, self._tiers.host.layers[layer], pages)

    def _submit(self, layer: int, q: Tensor, store: Tensor, pages: PageList) -> None:
        what = f"layer {layer}"
        self._tickets[layer] = self._workers.submit(q, store, pages, self._scale, what, self._owners)

    def answer(self, layer: int, rows: int, number: Tensor, counters: Tensor) -> tuple[Tensor, Tensor] | None:
        ticket = self._tickets.pop(layer, None)
        if ticket is None:
            return None
        needed = time.perf_counter()
        partial = ticket.wait(self._deadline)
        counters[_WAITED] += round((time.perf_counter() - needed) * 1e9)
        counters[_AHEAD] += round((needed - ticket.asked) * 1e9)
        return partial.out, partial.lse

    def failure(self, number: int) -> WorkerError | None:
        return None  # `answer` raises

    def abandon(self) -> None:
        while self._tickets:
            self._tickets.popitem()[1].abandon()

    def close(self) -> None:
        self.abandon()


class MailboxPartials:
    """Questions through pinned memory, asked and awaited by kernels in the device's stream.

    Raises:
        ConfigError: the workers' kernel is not the native one, which alone serves mailboxes.
    """

    def __init__(
        self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, shape: StepShape
    ) -> None:
        if not isinstance(workers, NativePool):
            raise ConfigError("workers.kernel: device_kernels: triton needs the native kernel; write auto or native")
        from hybrid_backend.kernels.triton import signal  # late: Triton is not everywhere

        self._signal = signal
        self._deadline = config.workers.deadline_seconds
        pinned = tiers.device.type == "cuda"
        self._allowed = round(self._deadline * 1e9)  # nanoseconds
        self._time_left = torch.zeros(1, dtype=torch.int64, device=tiers.device)
        # Of the last steps, since the host is behind the device when it asks.
        self._timed_out = torch.zeros(STEPS, dtype=torch.int32, pin_memory=pinned)
        layers, cache = tiers.layout.framed_layers(model), tiers.cache
        arrived = torch.zeros(len(layers), dtype=torch.int32, device=tiers.device)
        self._arrived = dict(zip(layers, arrived.split(1), strict=True))
        self.boxes = Mailboxes(
            workers.native,
            {layer: cache.stores.get(layer, tiers.host.layers[layer]) for layer in layers},
            model.num_heads,
            shape.rows,
            {layer: (0, 0) if layer in cache.row else shape.listed(tiers.has_digests(layer)) for layer in layers},
            model.scale,
            current=tiers.frames.generation,
            kept_tokens={layer: cache.tokens[row] for layer, row in cache.row.items()},
        )

    def begin(self, inputs: StepInputs, rows: int) -> None:
        # Plain copies to pinned memory: one that converts, or has gaps, would wait for the device.
        self.boxes.requests.copy_(inputs.requests.long(), non_blocking=True)
        # The workers drop rows of padding, so that what their lists held before does not matter.
        generations = inputs.generations.long().masked_fill(inputs.num_pages == 0, -1)
        self.boxes.generations.copy_(generations, non_blocking=True)
        self._time_left.fill_(self._allowed)

    def mailbox(self, layer: int) -> tuple[Tensor, Tensor]:
        box = self.boxes.layers[layer]
        return box.ids, box.counts

    def ask(
        self, layer: int, q: Tensor, missing: Tensor | None, listed: Tensor, is_told: bool, number: Tensor,
        counters: Tensor,
    ) -> None:  # fmt: skip
        box, rows = self.boxes.layers[layer], len(q)
        if missing is not None and not is_told:
            box.ids[:rows].copy_(missing, non_blocking=True)
            box.counts[:rows].copy_(listed, non_blocking=True)
        self._signal.ask(q, box.q, box.asked_flag, number, self._arrived[layer], listed, counters)

    def answer(self, layer: int, rows: int, number: Tensor, counters: Tensor) -> tuple[Tensor, Tensor] | None:
        box = self.boxes.layers[layer]
        self._signal.await_answer(box.answered, number, self._timed_out, self._time_left, counters)
        return box.out[:rows], box.lse[:rows]

    def failure(self, number: int) -> WorkerError | None:
        if int(self._timed_out[number % STEPS]) == number:
            return DeadlineError(f"CPU workers did not answer within workers.deadline_seconds={self._deadline}")
        why = self.boxes.failure(number)
        return None if why is None else WorkerError(why)

    def abandon(self) -> None:
        pass  # the generations of the next step tell the workers whose questions are void

    @property
    def host_bytes(self) -> int:
        return self.boxes.nbytes

    def close(self) -> None:
        self.boxes.close()
