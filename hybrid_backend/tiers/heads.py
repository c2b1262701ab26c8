"""Copies on the device tier of all pages of chosen KV heads. The host pool has the same pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.frames import device_zeros
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.stream import head_pages


class ResidentHeads:
    """Copies of all pages of chosen KV heads, indexed by host page id, so that a prefix-cache hit needs no copy.

    Attributes:
        heads: per layer the resident KV heads, ascending.
        stores: per layer ``[pages, len(heads), 2, page_size, head_dim]`` on the device tier.
    """

    def __init__(
        self, heads: Mapping[int, tuple[int, ...]], host: HostPool, operations: Operations, device: torch.device
    ) -> None:
        self.heads = {layer: tuple(sorted(chosen)) for layer, chosen in heads.items() if chosen}
        self._host, self._operations = host, operations
        self.stores: dict[int, Tensor] = {}
        self._head_ids: dict[int, Tensor] = {}
        self._ranks: dict[int, Tensor] = {}
        for layer, chosen in self.heads.items():
            pages, kv = len(host.layers[layer]), KvFormat.of(host.layers[layer]).with_heads(len(chosen))
            self.stores[layer] = device_zeros(kv.shape(pages), kv.dtype, device)
            self._head_ids[layer] = torch.tensor(chosen, dtype=torch.int64, device=device)
            self._ranks[layer] = ranks_among(chosen, host.layers[layer].shape[1], device)

    def append(self, layer: int, pages: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the resident heads of new tokens. Arguments are those of `Method.append`."""
        if layer in self.stores:
            heads = self._head_ids[layer] if len(self.heads[layer]) < k.shape[1] else None
            self._operations.append_tokens(k, v, self.stores[layer], pages, positions, heads=heads)

    def copy(self, pages: Tensor) -> None:
        """Copy the resident heads of whole pages (``[n]`` host page ids) from the host pool."""
        for layer, store in self.stores.items():
            host, count, heads = self._host.views[layer], store.shape[1], self._head_ids[layer]
            pages = pages.to(heads.device)
            sources = pages[:, None] * host.shape[1] + heads
            targets = pages[:, None] * count + torch.arange(count, device=heads.device)
            self._operations.copy_pages(head_pages(host), head_pages(store), sources.int(), targets.int())

    def pages(self, layer: int, table: Tensor) -> Tensor:
        """Return `store_pages` of a layer for the host pages ``table`` ``[rows, columns]``."""
        return store_pages(table, self._ranks[layer], len(self.heads[layer]))

    @property
    def count(self) -> int:
        """Number of resident KV heads, summed over layers."""
        return sum(map(len, self.heads.values()))

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())


def ranks_among(heads: Sequence[int], kv_heads: int, device: torch.device) -> Tensor:
    """Return ``[kv_heads]`` int32: the position of each KV head in ``heads``; 0 for KV heads that are not in it."""
    ranks = [heads.index(head) if head in heads else 0 for head in range(kv_heads)]
    return torch.tensor(ranks, dtype=torch.int32, device=device)


def store_pages(table: Tensor, ranks: Tensor, stored: int) -> Tensor:
    """Return the head pages ``[rows, kv_heads, columns]`` int32 of a store of ``stored`` KV heads, in one launch.

    ``table`` has the pages of the store, ``[rows, columns]`` int32; ``ranks`` is `ranks_among` the KV heads in the
    store. The entries of KV heads that are not in the store are undefined.
    """
    return torch.add(ranks[:, None], table[:, None], alpha=stored)


def resident_bytes(heads: Mapping[int, tuple[int, ...]], model: ModelSpec, page_size: int, pages: int) -> int:
    """Return the bytes that `ResidentHeads` allocates for a host pool of ``pages`` pages."""
    return sum(map(len, heads.values())) * pages * model.kv_format(page_size).with_heads(1).page_bytes
