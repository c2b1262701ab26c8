"""KV heads whose whole KV lies on the device tier, beside the host pool that has it as well."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.frames import device_zeros
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.stream import head_pages


class ResidentHeads:
    """Stores of some heads of some layers, indexed by host page id as digests are: a prefix hit finds them ready.

    ``heads[layer]``: the resident KV heads, ascending. ``stores[layer]``: ``[pages, len(heads), 2, page_size,
    head_dim]`` on the device tier.
    """

    def __init__(
        self, heads: Mapping[int, tuple[int, ...]], host: HostPool, operations: Operations, device: torch.device
    ) -> None:
        self.heads = {layer: tuple(sorted(some)) for layer, some in heads.items() if some}
        self._host, self._operations = host, operations
        self.stores: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}
        for layer, some in self.heads.items():
            pages, kv = len(host.layers[layer]), KvFormat.of(host.layers[layer]).with_heads(len(some))
            self.stores[layer] = device_zeros(kv.shape(pages), kv.dtype, device)
            self._kept[layer] = torch.tensor(some, dtype=torch.int64, device=device)

    def append(self, layer: int, pages: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """New tokens (`Method.append`)."""
        if layer in self.stores:
            if len(self.heads[layer]) < k.shape[1]:
                k, v = (x.index_select(1, self._kept[layer]) for x in (k, v))
            self._operations.append_tokens(k, v, self.stores[layer], pages, positions)

    def copy(self, pages: Tensor) -> None:
        """Take whole pages (``[n]`` host page ids) from the host pool, where somebody else wrote them."""
        for layer, store in self.stores.items():
            host, count, kept = self._host.views[layer], store.shape[1], self._kept[layer]
            pages = pages.to(kept.device)
            there = pages[:, None] * host.shape[1] + kept
            here = pages[:, None] * count + torch.arange(count, device=kept.device)
            self._operations.copy_pages(head_pages(host), head_pages(store), there.int(), here.int())

    def pages(self, layer: int, table: Tensor) -> Tensor:
        """`store_pages` of the layer."""
        return store_pages(table, self._kept[layer], self._host.views[layer].shape[1])

    @property
    def count(self) -> int:
        return sum(map(len, self.heads.values()))

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())


def store_pages(table: Tensor, kept: Tensor, kv_heads: int) -> Tensor:
    """``[rows, kv_heads, columns]`` int32: where a store of the heads ``kept`` (int64, ascending) has each head's page
    of the host pages ``table`` ``[rows, columns]``; for heads that it does not have it means nothing."""
    is_kept = (torch.arange(kv_heads, device=kept.device)[:, None] == kept).any(1)
    return table[:, None] * len(kept) + (is_kept.cumsum(0, dtype=torch.int32) - 1)[:, None]


def resident_bytes(heads: Mapping[int, tuple[int, ...]], model: ModelSpec, page_size: int, pages: int) -> int:
    """What `ResidentHeads` allocates over a host pool of ``pages`` pages."""
    return sum(map(len, heads.values())) * pages * model.kv_format(page_size).with_heads(1).page_bytes
