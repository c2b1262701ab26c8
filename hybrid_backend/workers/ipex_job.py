"""Jobs of the IPEX worker (`ipex.IpexPool`), and the shared memory that carries a job to the IPEX process."""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import time
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial, empty_partial
from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.workers.base import Owners

_ALIGNMENT = 64
"""Alignment in bytes of each tensor in shared memory."""


def check_shapes(q: Tensor, layer: Tensor, pages: PageList) -> None:
    """Raise ValueError if the shapes of a job do not fit each other, or are not supported by the IPEX worker."""
    if layer.dim() != 5 or not layer.is_contiguous():
        raise ValueError(f"K and V must be contiguous [pages, kv_heads, 2, page_size, head_dim], not {layer.shape}")
    if q.shape[2] != layer.shape[4] or q.shape[1] % layer.shape[1]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit K and V {tuple(layer.shape)}")
    if pages.ids.shape != pages.valid.shape or pages.ids.shape[:1] != q.shape[:1]:
        raise ValueError(f"page lists {tuple(pages.ids.shape)} do not fit {q.shape[0]} rows")


class _Field(NamedTuple):
    """Position of a tensor in an `Area`; ``offset`` is in bytes."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class Staged(NamedTuple):
    """A job in the form that the IPEX process takes.

    A sequence is a row; if each KV head of a row has its own page list, a sequence is a (row, KV head) pair. Sequences
    without pages are left out. A block is K or V of one page and KV head.
    """

    q: Tensor  # [sequences, heads, head_dim]
    blocks: Tensor  # [all blocks, page_size * head_dim] view of the engine's K and V of one layer
    block_ids: Tensor  # [staged blocks] int64 indices into `blocks`, in the order of staging
    groups: Tensor  # [groups, 4] int64, one row per length: sequences, KV heads, tokens in the pages, tokens to attend


class Area:
    """A staging area in shared memory: an anonymous file that this process and the IPEX process map.

    The kernel frees the memory once both processes have unmapped it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hybrid-ipex")
        self._map: mmap.mmap | None = None
        self._fields: dict[str, _Field] = {}

    def fill(self, staged: Staged, number: int, index: int, scale: float) -> bytes:
        """Copy a job into the area and return the packet that announces the job to the IPEX process.

        Args:
            staged: the job.
            number: number of the job, which the answer repeats.
            index: index of this area among the pool's areas.
            scale: factor of the attention logits.
        """
        q, elements = staged.q, len(staged.block_ids) * staged.blocks.shape[1]
        self._fields, end = {}, 0
        for name, dtype, shape in (
            ("groups", torch.int64, tuple(staged.groups.shape)),
            ("q", q.dtype, tuple(q.shape)),
            ("kv", q.dtype, (elements,)),
            ("out", torch.float32, tuple(q.shape)),
            ("lse", torch.float32, tuple(q.shape[:2])),
        ):
            self._fields[name] = _Field(end, str(dtype).removeprefix("torch."), shape)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        size = self._reserve(end)
        self.view("groups").copy_(staged.groups)
        self.view("q").copy_(q)
        torch.index_select(staged.blocks, 0, staged.block_ids, out=self.view("kv").view(len(staged.block_ids), -1))
        job = {"job": number, "area": index, "size": size, "scale": scale}
        return json.dumps({**job, "fields": self._fields}).encode()

    def view(self, name: str) -> Tensor:
        """Return a tensor of the job that `fill` copied last: groups, q, kv, out or lse."""
        assert self._map is not None
        field = self._fields[name]
        flat = torch.frombuffer(
            self._map, dtype=getattr(torch, field.dtype), count=math.prod(field.shape), offset=field.offset
        )
        return flat.view(field.shape)

    def close(self) -> None:
        self._map = None  # Python unmaps the memory with the last tensor over it.
        os.close(self.descriptor)

    def _reserve(self, size: int) -> int:
        """Grow the area to at least ``size`` bytes and return its size."""
        if self._map is None or len(self._map) < size:
            # The next power of two, so that the area rarely grows. Linux allocates a page at its first write.
            size = max(1 << 20, 1 << (size - 1).bit_length())
            os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size)
        return len(self._map)


class Job:
    """A submitted partial of the IPEX worker; also its ticket (`workers.base.Ticket`)."""

    def __init__(
        self, number: int, q: Tensor, layer: Tensor, pages: PageList, scale: float, what: str, owners: Owners | None
    ) -> None:
        self.number = number
        self.q = q
        self.scale = scale
        self.abandoned = False
        self.submit_time = time.perf_counter()
        self._layer = layer
        self._pages = pages
        self._what = what
        self._owners = owners
        self._done = threading.Event()
        self._result: Partial | None = None
        self._error = ""
        self._order = torch.empty(0, dtype=torch.int64)  # [sequences] index of each one's row or (row, KV head)

    def wait(self, deadline: float) -> Partial:
        if self.abandoned:
            raise WorkerError(f"{self._what} was abandoned")
        if not self._done.wait(deadline):
            self.abandon()
            raise DeadlineError(
                f"the IPEX worker did not finish {self._what} within workers.deadline_seconds={deadline}"
            )
        if self._result is None:
            raise WorkerError(f"the IPEX worker failed on {self._what}: {self._error}")
        return self._result

    def done(self) -> bool:
        return self.abandoned or self._done.is_set()

    def abandon(self) -> None:
        self.abandoned = True

    def finish(self, result: Partial) -> None:
        self._result = result
        self._done.set()

    def fail(self, error: str) -> None:
        self._error = error
        self._done.set()

    def stage(self) -> Staged | None:
        """Group the page lists by length; None if no row with a current request has a page.

        Raises:
            WorkerError: a page id is out of range, or a page other than the last of a list is partly filled.
        """
        layer, (ids, valid) = self._layer, self._pages
        rows, lists, columns = ids.shape
        _, kv_heads, _, page_size, dim = layer.shape
        valid = valid.clamp(max=page_size).masked_fill(ids < 0, 0)
        if self._owners is not None:
            valid = valid.masked_fill(self._stale(self._owners)[:, None, None], 0)
        if bool(((ids >= len(layer)) & (valid > 0)).any()):
            raise WorkerError(f"page id {int(ids.max())} is beyond the cache's {len(layer)} pages")
        ids, valid = ids.reshape(rows * lists, columns), valid.reshape(rows * lists, columns)
        used, tokens = (valid > 0).sum(1), valid.sum(1)
        if not bool(used.any()):
            return None
        last = valid.gather(1, (used - 1).clamp(min=0)[:, None])[:, 0]
        if not bool((tokens == (used - 1).clamp(min=0) * page_size + last).all()):
            raise WorkerError("only the last page of a list may be partly filled, and padding comes last")
        q = self.q.to(layer.dtype).reshape(rows * lists, -1, dim)
        k_and_v = torch.arange(2)[:, None]
        order, block_ids, groups = [], [], []
        for length in tokens.unique().tolist():
            if not length:
                continue
            sequences = (tokens == length).nonzero()[:, 0]
            # A sequence has one KV head if each KV head has its own page list, else all KV heads.
            heads = sequences[:, None] % lists if lists > 1 else torch.arange(kv_heads)[None]
            page_ids = ids[sequences, None, None, : -(-length // page_size)]
            blocks = (page_ids * kv_heads + heads[:, :, None, None]) * 2 + k_and_v  # [sequences, heads, 2, pages]
            order.append(sequences)
            block_ids.append(blocks.flatten())
            groups.append((len(sequences), blocks.shape[1], blocks.shape[3] * page_size, length))
        self._order = torch.cat(order)
        return Staged(q[self._order], layer.view(-1, page_size * dim), torch.cat(block_ids), torch.tensor(groups))

    def unpack(self, out: Tensor, lse: Tensor) -> Partial:
        """Return the job's partial from the IPEX process's ``out`` and ``lse``, copied out of the shared memory.

        Rows whose request was released since submission are empty: output 0, LSE -inf.
        """
        partial = empty_partial(self.q)
        sequences = self._pages.ids.shape[0] * self._pages.ids.shape[1]
        partial.out.view(sequences, -1, out.shape[2])[self._order] = out
        partial.lse.view(sequences, -1)[self._order] = lse
        if self._owners is not None:
            stale = self._stale(self._owners)
            partial.out[stale], partial.lse[stale] = 0.0, -math.inf
        return partial

    def _stale(self, owners: Owners) -> Tensor:
        """Return ``[rows]`` bool, true for rows whose request was released since submission."""
        return owners.current[owners.requests] != owners.generations
