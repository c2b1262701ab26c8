"""HGCA's context cache: the evicted tokens that each KV head still attends, compact and contiguous (section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList


class ContextCache:
    """One layer's kept tokens of all running requests, a list of its own for every KV head.

    ``store``: ``[pages, kv_heads, 2, page_size, head_dim]``, the host pool's layout, so the same kernels attend it. The
    pages of a region are shared by its heads: head h fills lane h of them, as far as its own list goes.
    """

    def __init__(self, layer: Tensor, regions: int) -> None:
        self.store = layer.new_empty((0, *layer.shape[1:]))
        self._heads, self._page_size = layer.shape[1], layer.shape[3]
        self._free: list[int] = []
        self._pages: list[list[int]] = [[] for _ in range(regions)]
        self._positions: list[list[Tensor]] = [self._nothing() for _ in range(regions)]

    @property
    def nbytes(self) -> int:
        return self.store.nbytes

    def add(self, region: int, head: int, kv: Tensor, positions: Tensor) -> None:
        """Append tokens to one KV head's list.

        Args:
            kv: ``[n, 2, head_dim]``.
            positions: ``[n]`` places in the sequence, ascending, after those that the list holds.
        """
        held = self._positions[region][head]
        place = torch.arange(len(held), len(held) + len(positions))
        self._reserve(region, -(-(len(held) + len(positions)) // self._page_size))
        pages = torch.tensor(self._pages[region], dtype=torch.int64)
        self.store[pages[place // self._page_size], head, :, place % self._page_size] = kv
        self._positions[region][head] = torch.cat([held, positions])

    def positions(self, region: int) -> list[Tensor]:
        """Per KV head, the positions in the sequence of its tokens, ascending."""
        return self._positions[region]

    def lists(self, regions: list[int]) -> PageList:
        """The pages to attend: ``[rows, kv_heads, k]``."""
        lengths = torch.tensor([[len(p) for p in self._positions[r]] for r in regions])
        columns = -(-int(lengths.max()) // self._page_size)
        ids = torch.full((len(regions), 1, columns), -1)
        for row, region in enumerate(regions):
            pages = self._pages[region][:columns]
            ids[row, 0, : len(pages)] = torch.tensor(pages, dtype=torch.int64)
        start = torch.arange(columns) * self._page_size
        valid = (lengths[..., None] - start).clamp(min=0, max=self._page_size)
        return PageList(ids.expand(-1, self._heads, -1).masked_fill(valid == 0, -1), valid)

    def release(self, region: int) -> None:
        self._free += self._pages[region]
        self._pages[region], self._positions[region] = [], self._nothing()

    def _nothing(self) -> list[Tensor]:
        return [torch.empty(0, dtype=torch.int64) for _ in range(self._heads)]

    def _reserve(self, region: int, pages: int) -> None:
        """Give the region so many pages; the store grows by half when none is free. Jobs that still read the old store
        keep it alive."""
        wanted = pages - len(self._pages[region])
        missing = wanted - len(self._free)
        if missing > 0:
            size = len(self.store)
            grown = self.store.new_zeros((max(size + missing, size * 3 // 2), *self.store.shape[1:]))
            grown[:size] = self.store
            self._free += range(len(grown) - 1, size - 1, -1)
            self.store = grown
        for _ in range(max(0, wanted)):
            self._pages[region].append(self._free.pop())
