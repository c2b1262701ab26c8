"""HGCA's context cache: the tokens that each KV head still attends after they left the window (section 3.2)."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.tiers.mapped import mapped_zeros

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 names it; this is Linux's number
_PIECE = 64  # pages copied at a time: bounds what is copied twice on the way


class ContextCache:
    """Kept tokens of all running requests, in some layers, a list of its own for every KV head.

    ``stores[l]``: ``[requests * pages, kv_heads, 2, page_size, head_dim]``, the host pool's layout, so the same kernels
    attend it. Request index i owns the pages ``i * pages .. (i + 1) * pages``, as many as a sequence can have; head h
    fills lane h of them one after the other, as far as its own list goes. All this is address space: memory is taken
    when a token is written and given back when its request is released. So a store never moves while somebody reads
    it, and nobody has to list pages.

    ``tokens``: ``[layers, requests, kv_heads]`` int32, the length of each list.
    """

    def __init__(self, layers: Mapping[int, Tensor], requests: int, pages: int) -> None:
        """``layers``: the host pool's, by number; ``pages``: of a sequence, at most.

        Raises:
            ConfigError: the system does not give the address space.
        """
        self.pages, self._layers = pages, dict(layers)
        self.row = {layer: row for row, layer in enumerate(layers)}
        formats = {layer: KvFormat.of(kv) for layer, kv in layers.items()}
        maps = {layer: _reserve(kv.shape(requests * pages), kv.dtype) for layer, kv in formats.items()}
        self.stores = {layer: store for layer, (store, _) in maps.items()}
        self._maps = [memory for _, memory in maps.values()]
        kv_heads = next((kv.shape[1] for kv in layers.values()), 0)
        self.tokens = torch.zeros(len(layers), requests, kv_heads, dtype=torch.int32)
        # By request: (position of the first token, [layers, kv_heads, tokens] which of them each head kept).
        self._kept: dict[int, list[tuple[int, Tensor]]] = {}
        self._lists: dict[int, tuple[list[int], PageList]] = {}  # the last that were made

    @property
    def nbytes(self) -> int:
        """Memory of the pages that lists have reached."""
        return sum(
            int((-(-self.tokens[self.row[layer]] // store.shape[3])).sum()) * store[0, 0].nbytes
            for layer, store in self.stores.items()
        )

    def add(self, request: int, first: int, keep: Tensor, pages: Tensor) -> None:
        """Append tokens of consecutive whole pages to a request's lists.

        Args:
            first: position of the first token in the sequence; later than all that the lists hold.
            keep: ``[layers, kv_heads, n * page_size]`` bool: which of them each head keeps.
            pages: ``[n]`` int64 their host pages.
        """
        tokens, size = self.tokens[:, request], keep.shape[2] // max(1, len(pages))
        for i in range(0, len(pages), _PIECE):
            piece = keep[..., i * size : (i + _PIECE) * size]
            row, head, token = piece.nonzero(as_tuple=True)
            place = request * self.pages * size + (tokens[..., None] + piece.cumsum(2) - 1)[row, head, token]
            moved = head, pages[i + token // size], token % size, place // size, place % size
            by_layer = zip(*(x.split(piece.sum((1, 2)).tolist()) for x in moved), strict=True)
            for layer, (lane, page, offset, to_page, to_offset) in zip(self.row, by_layer, strict=True):
                self.stores[layer][to_page, lane, :, to_offset] = self._layers[layer][page, lane, :, offset]
            tokens += piece.sum(2)
        self._kept.setdefault(request, []).append((first, keep))
        self._lists.clear()

    def positions(self, layer: int, request: int) -> list[Tensor]:
        """Per KV head, the positions in the sequence of the tokens of its list, ascending."""
        kept, nothing = self._kept.get(request, []), torch.empty(0, dtype=torch.int64)
        return [
            torch.cat([nothing, *(first + keep[self.row[layer], head].nonzero()[:, 0] for first, keep in kept)])
            for head in range(self.tokens.shape[2])
        ]

    def lists(self, layer: int, requests: list[int]) -> PageList:
        """What these requests' heads attend in ``stores[layer]``: ``[requests, kv_heads, k]``."""
        made = self._lists.get(layer)
        if made is None or made[0] != requests:
            page_size = self.stores[layer].shape[3]
            tokens = self.tokens[self.row[layer], requests]
            column = torch.arange(-(-int(tokens.max()) // page_size))
            valid = (tokens[..., None] - column * page_size).clamp(min=0, max=page_size)
            ids = torch.tensor(requests)[:, None, None] * self.pages + column
            made = requests, PageList(torch.where(valid > 0, ids, -1), valid.long())
            self._lists[layer] = made
        return made[1]

    def release(self, request: int) -> None:
        """Forget a request's lists, and give their memory back."""
        for layer, memory in zip(self.row, self._maps, strict=True):
            page, longest = self.stores[layer][0], int(self.tokens[self.row[layer], request].max())
            start = request * self.pages * page.nbytes
            end = start + -(-longest // page.shape[2]) * page.nbytes
            # Whole pages of the system's: a request beside it may reach into the others.
            start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                memory.madvise(mmap.MADV_DONTNEED, start, end - start)
        self._kept.pop(request, None)
        self.tokens[:, request] = 0
        self._lists.clear()


def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
    """Zeros that take no memory before they are written."""
    try:
        return mapped_zeros(shape, dtype, _MAP_NORESERVE)
    except OSError as error:
        size = prod(shape) * dtype.itemsize
        raise ConfigError(
            f"method: hgca reserves {size / 2**30:.1f} GiB of address space for each layer's context caches, which is "
            f"refused ({error}); allow it (vm.overcommit_memory=0, ulimit -v unlimited), or serve fewer or shorter "
            "requests at once"
        ) from error
