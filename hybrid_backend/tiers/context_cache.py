"""Context cache of HGCA: tokens that left the recent window and that a KV head still attends (paper, section 3.2)."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Judgement
from hybrid_backend.tiers.mapped import mapped_zeros

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # `mmap` has the name since Python 3.13.
_PIECE_PAGES = 64  # Pages copied at a time, which bounds the memory of the intermediate copy.


class ContextCache:
    """Token lists of the running requests in the cached layers: each KV head of each request has its own list.

    A layer's store reserves address space for ``pages`` pages per request, as many as a sequence can have. The kernel
    allocates memory when a token is written, and takes the memory back when the request is released. So a store never
    moves while a CPU worker reads it.

    A request whose prompt is being judged has no list yet. It attends all its older pages in the host pool, whole, in
    all cached layers (`attend_whole`). `take` gives it its lists.

    Attributes:
        stores: per layer ``[requests * pages, kv_heads, 2, page_size, width]``, the host pool's format (`KvFormat`), so
            that the same kernels attend it, and tokens are copied as they are encoded. Request index i owns the pages
            from ``i * pages`` on; KV head h writes its list to index h of the second dimension, without gaps.
        tokens: ``[layers, requests, kv_heads]`` int32: length of each list in tokens.
        row: row of each cached layer in ``tokens``.
        whole: ``[requests]`` int32: number of older pages that the request attends whole; 0: it attends its lists.
        whole_pages: ``[requests, pages]`` int32: host pages that ``whole`` counts.
    """

    def __init__(self, layers: Mapping[int, Tensor], requests: int, pages: int, is_pinned: bool = False) -> None:
        """Reserve the address space for the layers whose host pool tensors are ``layers``.

        Args:
            layers: host pool tensor of each cached layer.
            requests: requests that run at once.
            pages: pages of a sequence at most.
            is_pinned: a GPU writes ``whole_pages``.

        Raises:
            ConfigError: the operating system refuses the address space.
        """
        self.pages, self._layers = pages, dict(layers)
        self.row = {layer: row for row, layer in enumerate(layers)}
        formats = {layer: KvFormat.of(kv) for layer, kv in layers.items()}
        maps = {layer: _reserve(kv.shape(requests * pages), kv.dtype) for layer, kv in formats.items()}
        self.stores = {layer: store for layer, (store, _) in maps.items()}
        self._maps = [memory for _, memory in maps.values()]
        kv_heads = next((kv.shape[1] for kv in layers.values()), 0)
        self.tokens = torch.zeros(len(layers), requests, kv_heads, dtype=torch.int32)
        columns = pages if layers else 0
        self.whole = torch.zeros(requests, dtype=torch.int32)
        self.whole_pages = torch.zeros(requests, columns, dtype=torch.int32, pin_memory=is_pinned)
        self._reserved_tokens = [0] * requests  # Tokens that the judging of a request may have written to its pages.
        # Calls of `add` by request: (position of the first token, its argument `keep`).
        self._additions: dict[int, list[tuple[int, Tensor]]] = {}
        self._lists: dict[int, tuple[list[int], PageList]] = {}  # Requests and result of each layer's last `lists`.

    @property
    def nbytes(self) -> int:
        """Bytes of the pages to which the lists extend."""
        return sum(
            int((-(-self.tokens[self.row[layer]] // store.shape[3])).sum()) * store[0, 0].nbytes
            for layer, store in self.stores.items()
        )

    @property
    def whole_bytes(self) -> int:
        """Bytes of the page lists of requests that attend their older pages whole; allocated at start."""
        return self.whole.nbytes + self.whole_pages.nbytes if self.stores else 0

    def attend_whole(self, request: int, pages: int, reserved_tokens: int) -> None:
        """Let a request attend its older pages in the host pool, all tokens of them, until `take` gives it lists.

        Args:
            request: request index, with empty lists. The caller has written the pages to ``whole_pages[request]``.
            pages: number of these pages.
            reserved_tokens: tokens that workers may write to the request's pages of the stores.
        """
        self.whole[request], self._reserved_tokens[request] = pages, reserved_tokens
        self._lists.clear()

    def own_pages(self, layer: int, request: int) -> Tensor:
        """Return the pages of ``stores[layer]`` that belong to a request."""
        return self.stores[layer][request * self.pages : (request + 1) * self.pages]

    def take(self, request: int, first: int, judgement: Judgement) -> None:
        """Give a request the lists that workers have written to its pages, from position ``first`` on.

        The request then attends its lists. A step that is running may attend either: both hold the tokens between the
        sinks and the window.
        """
        self._additions[request] = [(first, judgement.keep_mask)]
        self.tokens[:, request] = judgement.counts
        self._lists.clear()

    def attend_lists(self, request: int) -> None:
        """Let a request attend its lists from the next question on, after `take` and `add` have completed them."""
        self.whole[request] = 0
        self._lists.clear()

    def whole_lists(self, requests: list[int]) -> PageList | None:
        """Return the host pages ``[requests, 1, k]`` that these requests attend whole; None if they attend none."""
        counts = self.whole[requests, None, None]
        longest = int(counts.max())
        if not longest:
            return None
        is_listed = torch.arange(longest) < counts
        size = next(iter(self.stores.values())).shape[3]
        ids = self.whole_pages[requests, None, :longest].long()
        return PageList(ids.masked_fill(~is_listed, -1), torch.where(is_listed, size, 0))

    def add(self, request: int, first: int, keep: Tensor, pages: Tensor) -> None:
        """Append tokens of ``n`` consecutive whole pages to a request's lists.

        Args:
            request: request index.
            first: position of the first token in the sequence, higher than all positions in the lists.
            keep: ``[layers, kv_heads, n * page_size]`` bool: true for tokens that the KV head appends to its list.
            pages: ``[n]`` int64 host pages that hold the tokens.
        """
        tokens, size = self.tokens[:, request], keep.shape[2] // max(1, len(pages))
        for i in range(0, len(pages), _PIECE_PAGES):
            piece = keep[..., i * size : (i + _PIECE_PAGES) * size]
            row, head, token = piece.nonzero(as_tuple=True)
            place = request * self.pages * size + (tokens[..., None] + piece.cumsum(2) - 1)[row, head, token]
            moved = head, pages[i + token // size], token % size, place // size, place % size
            by_layer = zip(*(x.split(piece.sum((1, 2)).tolist()) for x in moved), strict=True)
            for layer, (lane, page, offset, to_page, to_offset) in zip(self.row, by_layer, strict=True):
                pages_of_layer = self._layers[layer]
                KvFormat.of(pages_of_layer).copy_tokens(
                    pages_of_layer, (page, lane, offset), self.stores[layer], (to_page, lane, to_offset)
                )
            tokens += piece.sum(2)
        self._additions.setdefault(request, []).append((first, keep))
        self._lists.clear()

    def positions(self, layer: int, request: int) -> list[Tensor]:
        """Return the positions in the sequence of the tokens in each KV head's list, ascending."""
        additions, empty = self._additions.get(request, []), torch.empty(0, dtype=torch.int64)
        return [
            torch.cat([empty, *(first + keep[self.row[layer], head].nonzero()[:, 0] for first, keep in additions)])
            for head in range(self.tokens.shape[2])
        ]

    def lists(self, layer: int, requests: list[int]) -> PageList:
        """Return the pages ``[requests, kv_heads, k]`` of ``stores[layer]`` that hold the lists of these requests."""
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
        """Empty a request's lists and return their memory to the operating system."""
        for layer, memory in zip(self.row, self._maps, strict=True):
            page, listed = self.stores[layer][0], int(self.tokens[self.row[layer], request].max())
            longest = max(listed, self._reserved_tokens[request])
            start = request * self.pages * page.nbytes
            end = start + -(-longest // page.shape[2]) * page.nbytes
            # Only whole OS pages are returned, because the neighbouring request may use the rest of the outer two.
            start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                memory.madvise(mmap.MADV_DONTNEED, start, end - start)
        self._additions.pop(request, None)
        self.tokens[:, request] = 0
        self.whole[request] = self._reserved_tokens[request] = 0
        self._lists.clear()


def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
    """Return zeros that take no memory until they are written, and their mapping."""
    try:
        return mapped_zeros(shape, dtype, _MAP_NORESERVE)
    except OSError as error:
        size = prod(shape) * dtype.itemsize
        raise ConfigError(
            f"method: hgca reserves {size / 2**30:.1f} GiB of address space for each layer's context caches, which is "
            f"refused ({error}); allow it (vm.overcommit_memory=0, ulimit -v unlimited), or serve fewer or shorter "
            "requests at once"
        ) from error
