"""Jobs of the IPEX worker (`ipex.IpexPool`), and the memory in which they cross to its process."""

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


def check_shapes(q: Tensor, layer: Tensor, pages: PageList) -> None:
    if layer.dim() != 5 or not layer.is_contiguous():
        raise ValueError(f"K and V must be contiguous [pages, kv_heads, 2, page_size, head_dim], not {layer.shape}")
    if q.shape[2] != layer.shape[4] or q.shape[1] % layer.shape[1]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit K and V {tuple(layer.shape)}")
    if pages.ids.shape != pages.valid.shape or pages.ids.shape[:1] != q.shape[:1]:
        raise ValueError(f"page lists {tuple(pages.ids.shape)} do not fit {q.shape[0]} rows")


class _Field(NamedTuple):
    """Where a tensor lies in an area."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class Staged(NamedTuple):
    """One job as the process sees it. Its sequences are rows, or (row, KV head) pairs where each head has its own list;
    those without a page are left out."""

    q: Tensor  # [sequences, heads, head_dim]
    blocks: Tensor  # [n, page_size * head_dim] of the engine: all K and V blocks
    listed: Tensor  # [m] int64: which blocks, in the order in which they are staged
    groups: Tensor  # [g, 4] int64, sequences of the same length: count, KV heads, room, tokens


class Area:
    """Memory that both processes map: an anonymous file, which is gone with the last of them."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hybrid-ipex")
        self._map: mmap.mmap | None = None
        self._fields: dict[str, _Field] = {}

    def fill(self, staged: Staged, number: int, index: int, scale: float) -> bytes:
        """Copy a job into the area; returns the packet that tells the process."""
        q, elements = staged.q, len(staged.listed) * staged.blocks.shape[1]
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
        torch.index_select(staged.blocks, 0, staged.listed, out=self.view("kv").view(len(staged.listed), -1))
        job = {"job": number, "area": index, "size": size, "scale": scale}
        return json.dumps({**job, "fields": self._fields}).encode()

    def view(self, name: str) -> Tensor:
        """A field of the job that was filled in last."""
        assert self._map is not None
        field = self._fields[name]
        flat = torch.frombuffer(
            self._map, dtype=getattr(torch, field.dtype), count=math.prod(field.shape), offset=field.offset
        )
        return flat.view(field.shape)

    def close(self) -> None:
        self._map = None  # unmapped with its last view
        os.close(self.descriptor)

    def _reserve(self, size: int) -> int:
        if self._map is None or len(self._map) < size:
            # The next power of two, so that it rarely grows; memory is taken only where something was written.
            size = max(1 << 20, 1 << (size - 1).bit_length())
            os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size)
        return len(self._map)


class Job:
    """A submitted partial, and its ticket."""

    def __init__(
        self, number: int, q: Tensor, layer: Tensor, pages: PageList, scale: float, what: str, owners: Owners | None
    ) -> None:
        self.number = number
        self.q = q
        self.scale = scale
        self.abandoned = False
        self.asked = time.perf_counter()
        self._layer = layer
        self._pages = pages
        self._what = what
        self._owners = owners
        self._done = threading.Event()
        self._result: Partial | None = None
        self._error = ""
        self._order = torch.empty(0, dtype=torch.int64)  # which row, or (row, KV head) pair, each staged sequence is

    # --- for the waiter ---

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

    # --- for the pool's threads ---

    def finish(self, result: Partial) -> None:
        self._result = result
        self._done.set()

    def fail(self, error: str) -> None:
        self._error = error
        self._done.set()

    def stage(self) -> Staged | None:
        """The lists as the process wants them. None if no page is left, of rows whose request was not released.

        Raises:
            WorkerError: a page id beyond the cache, or a page that is partly filled and not the last.
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
        parts = torch.arange(2)[:, None]
        chosen, index, groups = [], [], []
        for length in tokens.unique().tolist():
            if not length:
                continue
            mine = (tokens == length).nonzero()[:, 0]
            # A list of its own for each KV head: one head per sequence.
            heads = mine[:, None] % lists if lists > 1 else torch.arange(kv_heads)[None]
            listed = ids[mine, None, None, : -(-length // page_size)]
            blocks = (listed * kv_heads + heads[:, :, None, None]) * 2 + parts  # [count, heads, 2, pages]
            chosen.append(mine)
            index.append(blocks.flatten())
            groups.append((len(mine), blocks.shape[1], blocks.shape[3] * page_size, length))
        self._order = torch.cat(chosen)
        return Staged(q[self._order], layer.view(-1, page_size * dim), torch.cat(index), torch.tensor(groups))

    def unpack(self, out: Tensor, lse: Tensor) -> Partial:
        """The result, out of the shared memory. Rows whose request was released meanwhile are empty."""
        partial = empty_partial(self.q)
        sequences = self._pages.ids.shape[0] * self._pages.ids.shape[1]
        partial.out.view(sequences, -1, out.shape[2])[self._order] = out
        partial.lse.view(sequences, -1)[self._order] = lse
        if self._owners is not None:
            stale = self._stale(self._owners)
            partial.out[stale], partial.lse[stale] = 0.0, -math.inf
        return partial

    def _stale(self, owners: Owners) -> Tensor:
        return owners.current[owners.requests] != owners.generations
