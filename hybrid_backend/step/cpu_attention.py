"""Partials that CPU workers compute for decode rows: requested for a layer, awaited when the layer needs the result.

`PoolCpuAttention` submits a request as a job of the worker pool; the device tier is then the host.
`MailboxCpuAttention` serves a GPU: kernels write requests to mailboxes in pinned memory and wait for the result. Python
takes no part in that, so a CUDA graph can capture the request and the wait.
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
from hybrid_backend.kernels.cpu import STEPS, HostLists, Mailboxes, QueryShape
from hybrid_backend.kernels.operations import Counters
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.patience import Patience
from hybrid_backend.tiers import Tiers
from hybrid_backend.workers import NativePool, Owners, Ticket, WorkerPool

_WAITED, _AHEAD = Counters._fields.index("waited"), Counters._fields.index("ahead")


class CpuAttention(Protocol):
    """Attention of decode rows over host pages, or over context caches, by the CPU workers."""

    def begin(self, rows: int) -> None:
        """Begin a step of ``rows`` decode rows, after the step inputs are written."""

    def mailbox(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the buffers from which the workers read the page lists of ``layer``.

        Returns:
            ``(pages [rows, lists, n], counts [rows, lists])`` int32, which `Operations.select_pages` fills; None: the
            workers read no mailbox.
        """

    def ask(self, layer: int, q: Tensor, pages: Tensor | None, counts: Tensor, in_mailbox: bool = False) -> None:
        """Request a partial of ``layer`` from the workers, without waiting for the result.

        Args:
            layer: index of a layer with full attention.
            q: ``[rows, heads, head_dim]``.
            pages: ``[rows, lists, n]`` int32 full host pages; None: the layer's context cache, or, of a request that is
                not judged yet, all its older pages.
            counts: ``[rows, lists]`` int32 pages in each list; with a context cache, 0 for an empty cache.
            in_mailbox: `select_pages` has already written ``pages`` and ``counts`` to the mailbox.
        """

    def take(self, layer: int, rows: int) -> tuple[Tensor, Tensor] | None:
        """Wait for the partial of ``layer`` in the step's stream.

        Returns:
            ``(out [rows, heads, head_dim], lse [rows, heads] fp32)``; None if no partial was requested.

        Raises:
            WorkerError: the workers failed or missed the deadline. With mailboxes `failure` reports the error instead.
        """

    def failure(self, number: int) -> WorkerError | None:
        """Return the workers' error in a recent step ``number`` (`StepInputs.number`) that the device has finished."""

    def abandon(self) -> None:
        """Drop the requests of the open step."""

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of the mailboxes, in bytes."""

    def close(self) -> None:
        """Free threads and native memory."""


class PoolCpuAttention:
    """Submits each request as a job of the worker pool. The device tier is the host."""

    host_bytes = 0
    """Host memory of mailboxes, in bytes; a worker pool has none."""

    def __init__(
        self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, buffers: StepBuffers
    ) -> None:
        self._workers, self._tiers, self._buffers = workers, tiers, buffers
        self._patience = Patience(config.workers.deadline_seconds)
        self._page_size, self._scale = config.page_size, model.scale
        self._owners: Owners | None = None
        self._tickets: dict[int, list[Ticket]] = {}

    def begin(self, rows: int) -> None:
        generation = self._tiers.frames.generation
        requests = self._buffers.inputs.requests[:rows].long()
        self._owners = Owners(requests, generation[requests], generation)

    def mailbox(self, layer: int) -> None:
        return None

    def ask(self, layer: int, q: Tensor, pages: Tensor | None, counts: Tensor, in_mailbox: bool = False) -> None:
        if pages is None:
            self._ask_caches(layer, q)
        else:
            longest = int(counts.max()) if counts.numel() else 0
            if not longest:
                return
            store = self._tiers.host.layers[layer]
            tokens = torch.where(torch.arange(longest) < counts[..., None], self._page_size, 0)
            lists = PageList(pages[..., :longest].long().masked_fill_(tokens == 0, -1), tokens)
            self._submit(layer, q, store, lists)

    def _ask_caches(self, layer: int, q: Tensor) -> None:
        """Request the partials of context caches, and of older pages that are attended whole."""
        assert self._owners is not None
        cache, requests = self._tiers.cache, self._owners.requests.tolist()
        lists, whole = cache.lists(layer, requests), cache.whole_lists(requests)
        if lists.ids.shape[2]:
            self._submit(layer, q, cache.stores[layer], lists)
        if whole is not None:
            self._submit(layer, q, self._tiers.host.layers[layer], whole)

    def _submit(self, layer: int, q: Tensor, store: Tensor, lists: PageList) -> None:
        ticket = self._workers.submit(q, store, lists, self._scale, f"layer {layer}", self._owners)
        self._tickets.setdefault(layer, []).append(ticket)

    def take(self, layer: int, rows: int) -> tuple[Tensor, Tensor] | None:
        tickets = self._tickets.pop(layer, None)
        if tickets is None:
            return None
        began = time.perf_counter()
        try:
            partials = [ticket.wait(self._patience.seconds) for ticket in tickets]
        except WorkerError as error:
            for ticket in tickets:
                ticket.abandon()
            if isinstance(error, DeadlineError):
                self._patience.note(is_missed=True)
            raise
        self._patience.note(is_missed=False)
        counters = self._buffers.layers[layer].counters
        counters[_WAITED] += round((time.perf_counter() - began) * 1e9)
        counters[_AHEAD] += round((began - tickets[0].submit_time) * 1e9)
        (out, lse), *more = partials
        for partial in more:  # No row has keys in two partials.
            has_keys = partial.lse > -torch.inf
            out, lse = torch.where(has_keys[..., None], partial.out, out), torch.where(has_keys, partial.lse, lse)
        return out, lse

    def failure(self, number: int) -> WorkerError | None:
        """Return None, because `take` raises the error."""
        return None

    def abandon(self) -> None:
        while self._tickets:
            for ticket in self._tickets.popitem()[1]:
                ticket.abandon()

    def close(self) -> None:
        self.abandon()


class MailboxCpuAttention:
    """Sends requests through pinned memory. Kernels in the device's stream write a request and wait for its result.

    Raises:
        ConfigError: the workers do not run the native kernel, and no other kernel reads mailboxes.
    """

    def __init__(
        self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, buffers: StepBuffers
    ) -> None:
        if not isinstance(workers, NativePool):
            raise ConfigError("workers.kernel: device_kernels: triton needs the native kernel; write auto or native")
        # A CPU server does not need Triton, so Triton is imported only with a GPU.
        from hybrid_backend.kernels.triton import signal

        self._signal, self._buffers = signal, buffers
        self._deadline = config.workers.deadline_seconds
        self._patience = Patience(self._deadline)
        is_pinned = tiers.device.type == "cuda"
        self._time_left = torch.zeros(1, dtype=torch.int64, device=tiers.device)  # Nanoseconds.
        # Each of the last steps has an entry, because the host reads an entry some steps after the device wrote it.
        self._timed_out = torch.zeros(STEPS, dtype=torch.int32, pin_memory=is_pinned)
        layers, cache, shape = tiers.layout.framed_layers(model), tiers.cache, buffers.shape
        arrived = torch.zeros(len(layers), dtype=torch.int32, device=tiers.device)
        self._arrived = dict(zip(layers, arrived.split(1), strict=True))
        self.boxes = Mailboxes(
            workers.native,
            {layer: cache.stores.get(layer, tiers.host.layers[layer]) for layer in layers},
            QueryShape(model.num_heads, model.dtype),
            shape.rows,
            {layer: (0, 0) if layer in cache.row else shape.list_shape(tiers.has_digests(layer)) for layer in layers},
            model.scale,
            current=tiers.frames.generation,
            host_lists={
                layer: HostLists(cache.tokens[row], cache.whole, cache.whole_pages, tiers.host.layers[layer])
                for layer, row in cache.row.items()
            },
        )

    def begin(self, rows: int) -> None:
        inputs = self._buffers.inputs
        # The dtype is converted on the device: a copy to pinned memory that converts would block the host.
        self.boxes.requests.copy_(inputs.requests.long(), non_blocking=True)
        # Padding rows keep the lists of earlier steps. Generation -1 makes the workers skip a row.
        generations = inputs.generations.long().masked_fill(inputs.num_pages == 0, -1)
        self.boxes.generations.copy_(generations, non_blocking=True)
        self._time_left.fill_(round(self._patience.seconds * 1e9))

    def mailbox(self, layer: int) -> tuple[Tensor, Tensor]:
        box = self.boxes.layers[layer]
        return box.ids, box.counts

    def ask(self, layer: int, q: Tensor, pages: Tensor | None, counts: Tensor, in_mailbox: bool = False) -> None:
        box, rows = self.boxes.layers[layer], q.shape[0]
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
            self._patience.note(is_missed=True)
            return DeadlineError(f"CPU workers did not answer within workers.deadline_seconds={self._deadline}")
        if self._patience.is_short and any(int(box.answered[0]) >= number for box in self.boxes.layers.values()):
            self._patience.note(is_missed=False)
        reason = self.boxes.failure(number)
        return None if reason is None else WorkerError(reason)

    def abandon(self) -> None:
        """Do nothing, because the generations of the next step tell the workers which requests to skip."""

    @property
    def host_bytes(self) -> int:
        return self.boxes.nbytes

    def close(self) -> None:
        self.boxes.close()
