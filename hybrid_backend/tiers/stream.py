"""Streaming of host KV through two staging buffers on the device (HeadInfer, arXiv 2502.12574, section 3).

The device attends one buffer while the other is filled. Prompt chunks attend earlier pages that have no frame through
the buffers, and HeadInfer's decode rows attend all of their pages so. The buffers' size does not depend on the context
length. A *head page* is K and V of one page and one KV head, ``[1, 2, page_size, head_dim]``.
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
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.side_stream import side_stream
from hybrid_backend.tiers.sizes import staging_shape


class _Ahead(NamedTuple):
    """First block of a layer, whose copy has begun before the layer runs."""

    layer: int
    pages: Tensor
    piece: tuple[tuple[int, ...], int, int]  # KV heads, first token and last token + 1
    ready: Callable[[], Tensor]  # waits for the copy and returns the buffer


class Piece(NamedTuple):
    """Content of a staging buffer at one time: a part of several lists of head pages, one list after the other."""

    pages: Tensor  # [capacity] int32 head pages in the host pool
    places: Tensor  # [capacity] int32 target of each head page in the buffer; -1: the head page is not copied
    first: Tensor  # [lists, 1, 1] int32 place in the buffer of each list's first head page in this piece
    tokens: Tensor  # [lists, 1] int32 tokens of each list in this piece


def cut(
    counts: Tensor, max_pages: int, capacity: int, page_size: int, head_pages_at: Callable[[Tensor, Tensor], Tensor]
) -> list[Piece]:
    """Cut lists of head pages into pieces that each fit a staging buffer.

    The number of pieces depends only on ``max_pages``, so that a captured CUDA graph has a fixed number of copies. The
    last pieces may be empty.

    Args:
        counts: ``[lists]`` number of head pages in each list.
        max_pages: most head pages of all lists together.
        capacity: head pages of a staging buffer.
        page_size: tokens of a page.
        head_pages_at: function from lists and places in them, both ``[n]`` int64, to head pages ``[n]`` int32. For a
            place beyond the end of a list the result is not used.
    """
    ends = counts.cumsum(0)
    begins = ends - counts

    def piece(start: int) -> Piece:
        numbers = torch.arange(start, start + capacity, device=counts.device)
        lists = torch.searchsorted(ends, numbers, right=True).clamp(max=len(counts) - 1)
        places = (numbers - start).masked_fill(numbers >= ends[-1], -1)
        first, end = ((x - start).clamp(0, capacity).int() for x in (begins, ends))
        pages = head_pages_at(lists, numbers - begins[lists])
        return Piece(pages, places.int(), first[:, None, None], ((end - first) * page_size)[:, None])

    return [piece(start) for start in range(0, max_pages, capacity)]


def head_pages(store: Tensor) -> Tensor:
    """View contiguous pages or digests ``[pages, heads, ...]`` as ``[pages * heads, 1, ...]``, one per KV head."""
    return store.flatten(0, 1)[:, None]


class HeadStream:
    """Two staging buffers, each for ``tokens`` tokens of all KV heads.

    A GPU fills the buffers in a separate CUDA stream. A CPU copies synchronously, because its cores also attend.
    """

    def __init__(
        self,
        host: HostPool,
        kv: KvFormat,
        dtype: torch.dtype,
        tokens: int,
        operations: Operations,
        device: torch.device,
    ) -> None:
        """Allocate the buffers; ``dtype`` is what blocks are decoded to if pages are in 8 bits."""
        self._host, self._kv, self._dtype, self._operations = host, kv, dtype, operations
        self._buffers = torch.empty(staging_shape(kv, tokens), dtype=kv.dtype, device=device)
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffer = 0  # Index of the buffer that was filled last.
        self._ahead: _Ahead | None = None
        self.copied_bytes = 0  # Bytes copied since start.

    @property
    def capacity(self) -> int:
        """Number of head pages that a staging buffer holds."""
        return self._buffers.shape[1]

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes

    def through(
        self,
        copies: Iterable[Callable[[Tensor], object]],
        ready: Callable[[], Tensor] | None = None,
        last: Callable[[], object] | None = None,
    ) -> Iterator[Tensor]:
        """Run copies through the two staging buffers; yield the filled buffer of each copy.

        On a GPU the current stream waits for the copy. The next copy begins before a buffer is yielded, and overwrites
        the buffer that was yielded before.

        Args:
            copies: functions that fill a buffer ``[capacity, 1, 2, page_size, head_dim]`` from host pages.
            ready: waits for a copy that has begun already, and returns its buffer, which is yielded first.
            last: function that is called before the last buffer is yielded. It may begin one more copy.
        """
        try:
            for copy in copies:
                previous, ready = ready, self._fill(copy)
                if previous is not None:
                    yield previous()
            if ready is not None:
                previous, ready = ready, None
                if last is not None:
                    last()
                yield previous()
        finally:
            if ready is not None:
                ready()  # The step failed. Its stream must not reuse memory that the copy still reads.

    def _fill(self, copy: Callable[[Tensor], object]) -> Callable[[], Tensor]:
        """Begin to fill the other buffer; return a function that waits for the copy and returns the buffer."""
        self._ahead = None  # Another copy may overwrite that buffer from now on.
        self._buffer ^= 1
        buffer = self._buffers[self._buffer]
        if self._copy_stream is None:
            copy(buffer)
            return lambda: buffer
        # The copy follows the attention that read this buffer and the writes to the host pages: both were launched
        # on the step's stream before.
        with side_stream(self._copy_stream):
            copy(buffer)
            done = self._copy_stream.record_event()

        def ready() -> Tensor:
            torch.cuda.current_stream().wait_event(done)
            return buffer

        return ready

    def blocks(
        self,
        layer: int,
        heads: tuple[int, ...],
        groups: int,
        pages: Tensor,
        tokens: int,
        next_layer: int | None = None,
    ) -> Iterator[KVBlock]:
        """Yield K and V of the first ``tokens`` tokens of a sequence, one head group after the other.

        A group that does not fit a staging buffer is cut along the tokens.

        Args:
            layer: index of the layer.
            heads: KV heads.
            groups: least number of groups.
            pages: host pages ``[n]`` int64 of the sequence.
            tokens: number of tokens.
            next_layer: layer that streams the same pages next. On a GPU its first block is copied while the device
                attends the last block and computes until that layer. None: the pages may still change.
        """
        page_size = self._kv.page_size
        size = max(1, min(-(-len(heads) // groups), self.capacity))
        step = self.capacity // size * page_size
        pieces = [
            (heads[first : first + size], start, min(tokens, start + step))
            for first in range(0, len(heads), size)
            for start in range(0, tokens, step)
        ]
        ahead, self._ahead = self._ahead, None
        is_ahead = ahead is not None and (ahead.layer, ahead.piece) == (layer, pieces[0]) and ahead.pages is pages
        copies = [self._copy(layer, pages, piece) for piece in pieces[is_ahead:]]
        following: Callable[[], None] | None = None
        if next_layer is not None and self._copy_stream is not None:
            following = partial(self._begin_ahead, next_layer, pages, pieces[0])
        buffers = self.through(copies, ahead.ready if ahead is not None and is_ahead else None, following)
        for (group, start, end), buffer in zip(pieces, buffers, strict=True):
            k, v = self._read(buffer, len(group), -(-(end - start) // page_size))
            yield KVBlock(group, k[:, : end - start], v[:, : end - start])

    def _copy(self, layer: int, pages: Tensor, piece: tuple[tuple[int, ...], int, int]) -> Callable[[Tensor], None]:
        """Return the function that copies some KV heads of some tokens of a sequence to a buffer."""
        (heads, start, end), page_size = piece, self._kv.page_size
        return partial(self._gather, layer, heads, pages[start // page_size : -(-end // page_size)])

    def _read(self, buffer: Tensor, heads: int, pages: int) -> tuple[Tensor, Tensor]:
        """Return K and V ``[heads, pages * page_size, head_dim]`` that `_gather` has copied to a buffer."""
        kv = self._kv
        if kv.is_int8:
            k, v = (x.to(self._dtype).view(heads, -1, kv.head_dim) for x in kv.decode(buffer[: heads * pages, 0]))
            return k, v
        tokens = pages * kv.page_size
        k, v = buffer.flatten()[: heads * 2 * tokens * kv.head_dim].view(heads, 2, tokens, kv.head_dim).unbind(1)
        return k, v

    def _begin_ahead(self, layer: int, pages: Tensor, piece: tuple[tuple[int, ...], int, int]) -> None:
        """Begin to copy the first block of the layer that runs next."""
        ready = self._fill(self._copy(layer, pages, piece))
        self._ahead = _Ahead(layer, pages, piece, ready)

    def _gather(self, layer: int, heads: tuple[int, ...], pages: Tensor, buffer: Tensor) -> None:
        """Copy host pages to a buffer, one KV head after the other.

        A head's part is K of all tokens, then V, each contiguous for the attention; or, in 8 bits, its head pages.
        """
        blocks = self._host.blocks(layer)
        head, pages = (sent(x, blocks.device) for x in (torch.tensor(heads), pages))
        index, page_size = pages * self._kv.kv_heads + head[:, None], self._kv.page_size
        if not self._kv.is_int8:
            # `copy_pages` moves pages with K and V. K or V of a head page is as large as one of half the tokens.
            index, page_size = index[:, None] * 2 + torch.arange(2, device=blocks.device)[:, None], page_size // 2
        index = index.flatten().int()
        source, target = (x.view(-1, 1, 2, page_size, self._kv.width) for x in (blocks, buffer))
        self._operations.copy_pages(
            source, target, index, torch.arange(len(index), dtype=torch.int32, device=index.device)
        )
        self.copied_bytes += len(index) * source[0].nbytes
