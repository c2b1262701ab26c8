"""Streaming: what the device tier does not hold passes through two staging buffers (HeadInfer, arXiv 2502.12574,
section 3). While one is attended, the other is filled.

Prompts of all methods attend what came before them this way; HeadInfer's decoding rows use the same buffers. Device
memory is two buffers, whatever the context: ``2 (buffers) x tokens x heads of a group x 2 (K, V) x head_dim x element
size``. A *head page* is K and V of one page and one KV head, ``[1, 2, page_size, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.attention.prefill import KVBlock
from hybrid_backend.batch import sent
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.beside import beside
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.sizes import staging_shape


class Piece(NamedTuple):
    """What a buffer holds at a time of lists of head pages that are laid end to end."""

    pages: Tensor  # [capacity] int32 head pages of the host pool
    places: Tensor  # [capacity] int32 where they go, -1: nowhere
    first: Tensor  # [lists, 1, 1] int32 place of the first one of each list that is in the piece
    tokens: Tensor  # [lists, 1] int32 that the piece holds of each list


def cut(
    counts: Tensor, most: int, capacity: int, page_size: int, nth_of: Callable[[Tensor, Tensor], Tensor]
) -> list[Piece]:
    """Lists in pieces that fit a buffer: as many as ``most`` head pages need, so that a captured graph keeps its shape;
    the last ones may be empty.

    Args:
        counts: ``[lists]`` head pages of each.
        capacity: head pages of a buffer.
        nth_of: the nth head pages ``[n]`` int32 of lists, both ``[n]`` int64; a number may be too high, and what comes
            of it is not used.
    """
    ends = counts.cumsum(0)
    begins = ends - counts

    def piece(start: int) -> Piece:
        at = torch.arange(start, start + capacity, device=counts.device)
        lists = torch.searchsorted(ends, at, right=True).clamp(max=len(counts) - 1)
        places = (at - start).masked_fill(at >= ends[-1], -1)
        first, end = ((x - start).clamp(0, capacity).int() for x in (begins, ends))
        pages = nth_of(lists, at - begins[lists])
        return Piece(pages, places.int(), first[:, None, None], ((end - first) * page_size)[:, None])

    return [piece(start) for start in range(0, most, capacity)]


def head_pages(store: Tensor) -> Tensor:
    """``[pages, heads, ...]``, contiguous, as ``[pages * heads, 1, ...]``: pages, or their digests, of single heads."""
    return store.flatten(0, 1)[:, None]


class HeadStream:
    """Two staging buffers of ``tokens`` tokens of all KV heads each. A GPU fills them in a stream beside the step's; a
    host copies at once, because the cores that would copy are those that attend."""

    def __init__(self, host: HostPool, kv: KvFormat, tokens: int, operations: Operations, device: torch.device) -> None:
        self._host, self._kv_heads, self._operations = host, kv.kv_heads, operations
        self._buffers = torch.empty(staging_shape(kv, tokens), dtype=kv.dtype, device=device)
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._turn = 0
        self.copied_bytes = 0  # since start

    @property
    def capacity(self) -> int:
        """Head pages that a buffer holds."""
        return self._buffers.shape[1]

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes

    def through(self, copies: Iterable[Callable[[Tensor], object]]) -> Iterator[Tensor]:
        """A buffer for each copy, filled (on a GPU: waited for in the step's stream) when it is handed out. The next
        copy begins before that, and overwrites the buffer that was handed out before.

        Args:
            copies: each writes a buffer, ``[capacity, 1, 2, page_size, head_dim]``, from host pages.
        """
        ready: Callable[[], Tensor] | None = None
        try:
            for copy in copies:
                now, ready = ready, self._fill(copy)
                if now is not None:
                    yield now()
            if ready is not None:
                now, ready = ready, None
                yield now()
        finally:
            if ready is not None:
                ready()  # the step failed: the copy still reads what the step's stream may reuse

    def _fill(self, copy: Callable[[Tensor], object]) -> Callable[[], Tensor]:
        """Begin to fill the other buffer; the result waits for it."""
        self._turn ^= 1
        buffer = self._buffers[self._turn]
        if self._copying is None:
            copy(buffer)
            return lambda: buffer
        # Whatever attended this buffer before, or wrote the host pages, is in the step's stream already.
        with beside(self._copying):
            copy(buffer)
            done = self._copying.record_event()

        def ready() -> Tensor:
            torch.cuda.current_stream().wait_event(done)
            return buffer

        return ready

    def blocks(self, layer: int, heads: tuple[int, ...], groups: int, pages: Tensor, tokens: int) -> Iterator[KVBlock]:
        """K and V of the first ``tokens`` tokens of a sequence: ``groups`` groups of the KV heads (or more) one after
        the other, each cut along the tokens if it is longer than a buffer.

        Args:
            pages: ``[n]`` int64 host page ids.
        """
        page_size, dim = self._buffers.shape[-2:]
        size = max(1, min(-(-len(heads) // groups), self.capacity))
        step = self.capacity // size * page_size
        pieces = [
            (heads[first : first + size], start, min(tokens, start + step))
            for first in range(0, len(heads), size)
            for start in range(0, tokens, step)
        ]
        buffers = self.through(
            partial(self._gather, layer, group, pages[start // page_size : -(-end // page_size)])
            for group, start, end in pieces
        )
        for (group, start, end), buffer in zip(pieces, buffers, strict=True):
            padded = -(-(end - start) // page_size) * page_size
            kv = buffer.flatten()[: len(group) * 2 * padded * dim].view(len(group), 2, padded, dim)
            yield KVBlock(group, *kv[:, :, : end - start].unbind(1))

    def _gather(self, layer: int, heads: tuple[int, ...], pages: Tensor, buffer: Tensor) -> None:
        """Head by head, K before V, because attention of many queries wants all tokens of each together."""
        blocks = self._host.blocks(layer)  # as the device sees them
        head, pages = (sent(x, blocks.device) for x in (torch.tensor(heads), pages))
        half = torch.arange(2, device=blocks.device)
        index = ((pages * self._kv_heads + head[:, None])[:, None] * 2 + half[:, None]).flatten().int()
        # What is copied as a page is K or V of a head page: a page of one head and half as many tokens.
        _, page_size, dim = blocks.shape
        host, to = (x.view(-1, 1, 2, page_size // 2, dim) for x in (blocks, buffer))
        self._operations.copy_pages(host, to, index, torch.arange(len(index), dtype=torch.int32, device=index.device))
        self.copied_bytes += len(index) * host[0].nbytes
