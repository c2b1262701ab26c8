"""Attention that CPU workers compute: asked for in one layer, awaited in a later one.

There are two transports. Where the device tier is the host, a request to the workers is a job of the thread pool. A GPU
asks through mailboxes in pinned memory. Nothing of that passes through Python, so a CUDA graph holds the request and
the wait.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList
from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError, DeadlineError, WorkerError
from hybrid_backend.kernels.cpu import STEPS, Mailboxes
from hybrid_backend.kernels.operations import Counters
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.tiers import Tiers
from hybrid_backend.workers import NativePool, Owners, Ticket, WorkerPool

_WAITED, _AHEAD = Counters._fields.index("waited"), Counters._fields.index("ahead")


class CpuAttention(Protocol):
    """Attention of decode rows over host pages, or over context caches, by the CPU workers."""

    def begin(self, rows: int) -> None:
        """Begin a step of ``rows`` rows, whose inputs are written."""

    def mailbox(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return ``(pages, counts)`` that the workers read for ``layer`` (`Operations.select_pages`); None: none."""

    def ask(self, layer: int, q: Tensor, pages: Tensor | None, counts: Tensor, in_mailbox: bool = False) -> None:
        """Let the workers attend; returns at once.

        Args:
            layer: index of a layer with full attention.
            q: ``[rows, heads, head_dim]``.
            pages: ``[rows, lists, n]`` int32 whole host pages; None: what the layer's context cache holds.
            counts: ``[rows, lists]`` int32 pages in each list; with a context cache 0 where it holds nothing.
            in_mailbox: `select_pages` has written ``pages`` and ``counts`` to the mailbox.
        """

    def take(self, layer: int, rows: int) -> tuple[Tensor, Tensor] | None:
        """Wait for ``(out [rows, heads, head_dim], lse [rows, heads] fp32)``; None: nothing was asked.

        Raises:
            WorkerError: the workers failed or were late, and the caller can be told (not from inside a stream).
        """

    def failure(self, number: int) -> WorkerError | None:
        """Return what went wrong in a recent step that the device has passed; ``number``: `StepInputs.number`."""

    def abandon(self) -> None:
        """Forget what was asked in the open step."""

    @property
    def host_bytes(self) -> int: ...

    def close(self) -> None: ...


class PoolCpuAttention:
    """Jobs of the worker pool; the device tier is the host."""

    host_bytes = 0

    def __init__(
        self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, buffers: StepBuffers
    ) -> None:
        self._workers, self._tiers, self._buffers = workers, tiers, buffers
        self._deadline, self._page_size, self._scale = config.workers.deadline_seconds, config.page_size, model.scale
        self._owners: Owners | None = None
        self._tickets: dict[int, Ticket] = {}

    def begin(self, rows: int) -> None:
        generation = self._tiers.frames.generation
        requests = self._buffers.inputs.requests[:rows].long()
        self._owners = Owners(requests, generation[requests], generation)

    def mailbox(self, layer: int) -> None:
        return None

    def ask(self, layer: int, q: Tensor, pages: Tensor | None, counts: Tensor, in_mailbox: bool = False) -> None:
        if pages is None:
            assert self._owners is not None
            cache = self._tiers.cache
            store, lists = cache.stores[layer], cache.lists(layer, self._owners.requests.tolist())
            longest = lists.ids.shape[2]
        else:
            store, longest = self._tiers.host.layers[layer], int(counts.max()) if counts.numel() else 0
            tokens = torch.where(torch.arange(longest) < counts[..., None], self._page_size, 0)
            lists = PageList(pages[..., :longest].long().masked_fill_(tokens == 0, -1), tokens)
        if longest:
            self._tickets[layer] = self._workers.submit(q, store, lists, self._scale, f"layer {layer}", self._owners)

    def take(self, layer: int, rows: int) -> tuple[Tensor, Tensor] | None:
        ticket = self._tickets.pop(layer, None)
        if ticket is None:
            return None
        began = time.perf_counter()
        partial = ticket.wait(self._deadline)
        counters = self._buffers.layers[layer].counters
        counters[_WAITED] += round((time.perf_counter() - began) * 1e9)
        counters[_AHEAD] += round((began - ticket.submit_time) * 1e9)
        return partial.out, partial.lse

    def failure(self, number: int) -> WorkerError | None:
        return None  # `take` raises

    def abandon(self) -> None:
        while self._tickets:
            self._tickets.popitem()[1].abandon()

    def close(self) -> None:
        self.abandon()


class MailboxCpuAttention:
    """Requests through pinned memory, sent and awaited by kernels in the device's stream.

    Raises:
        ConfigError: the workers' kernel is not the native one, which alone serves mailboxes.
    """

    def __init__(
        self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, buffers: StepBuffers
    ) -> None:
        if not isinstance(workers, NativePool):
            raise ConfigError("workers.kernel: device_kernels: triton needs the native kernel; write auto or native")
        from hybrid_backend.kernels.triton import signal  # late: Triton is not installed everywhere

        self._signal, self._buffers = signal, buffers
        self._deadline = config.workers.deadline_seconds
        is_pinned = tiers.device.type == "cuda"
        self._allowed_ns = round(self._deadline * 1e9)
        self._time_left = torch.zeros(1, dtype=torch.int64, device=tiers.device)
        # One entry for each of the last steps, because the host is behind the device when it asks.
        self._timed_out = torch.zeros(STEPS, dtype=torch.int32, pin_memory=is_pinned)
        layers, cache, shape = tiers.layout.framed_layers(model), tiers.cache, buffers.shape
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

    def begin(self, rows: int) -> None:
        inputs = self._buffers.inputs
        # Plain copies to pinned memory: a copy that converts, or has gaps, would wait for the device.
        self.boxes.requests.copy_(inputs.requests.long(), non_blocking=True)
        # The workers drop padding rows, whatever their lists held before.
        generations = inputs.generations.long().masked_fill(inputs.num_pages == 0, -1)
        self.boxes.generations.copy_(generations, non_blocking=True)
        self._time_left.fill_(self._allowed_ns)

    def mailbox(self, layer: int) -> tuple[Tensor, Tensor]:
        box = self.boxes.layers[layer]
        return box.ids, box.counts

    def ask(self, layer: int, q: Tensor, pages: Tensor | None, counts: Tensor, in_mailbox: bool = False) -> None:
        box, rows = self.boxes.layers[layer], len(q)
        if pages is not None and not in_mailbox:
            box.ids[:rows].copy_(pages, non_blocking=True)
            box.counts[:rows].copy_(counts, non_blocking=True)
        number, counters = self._buffers.inputs.number, self._buffers.layers[layer].counters
        self._signal.ask(q, box.q, box.asked_flag, number, self._arrived[layer], counts, counters)

    def take(self, layer: int, rows: int) -> tuple[Tensor, Tensor] | None:
        box, number, counters = (
            self.boxes.layers[layer],
            self._buffers.inputs.number,
            self._buffers.layers[layer].counters,
        )
        self._signal.await_answer(box.answered, number, self._timed_out, self._time_left, counters)
        return box.out[:rows], box.lse[:rows]

    def failure(self, number: int) -> WorkerError | None:
        if int(self._timed_out[number % STEPS]) == number:
            return DeadlineError(f"CPU workers did not answer within workers.deadline_seconds={self._deadline}")
        reason = self.boxes.failure(number)
        return None if reason is None else WorkerError(reason)

    def abandon(self) -> None:
        """Do nothing: the generations of the next step tell the workers which requests are void."""

    @property
    def host_bytes(self) -> int:
        return self.boxes.nbytes

    def close(self) -> None:
        self.boxes.close()
