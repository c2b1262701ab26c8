"""Digests of all host pages: channel-wise max and min of K (Quest, arXiv 2406.10774, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels.cpu import digests as native
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.step import PrefillRow, sent
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.sizes import digest_shape


class Digests:
    """One digest per (layer, page, KV head), indexed by host page id, so that a prefix-cache hit finds it ready.

    ``layers[l]``: ``[pages, kv_heads, 2, head_dim]``; ``[..., 0, :]`` is the max, ``[..., 1, :]`` the min.
    Invariant: the digest of a page covers exactly the tokens written to it so far. A token at offset 0 makes a page
    new, whatever the page held before.

    ``in_bytes[l]``: the same digests in bytes (`kernels.cpu.digests.quantize`), ``[pages, row]`` uint8, of whole pages
    only, if asked for.
    """

    def __init__(
        self, host: HostPool, layers: list[int], operations: Operations, in_bytes: bool, device: torch.device
    ) -> None:
        self._host, self._operations = host, operations
        self.layers: dict[int, Tensor] = {}
        self.in_bytes: dict[int, Tensor] = {}
        for layer in layers:
            pages, heads, _, _, dim = host.layers[layer].shape
            self.layers[layer] = host.layers[layer].new_zeros(digest_shape(pages, heads, dim), device=device)
            if in_bytes:
                self.in_bytes[layer] = native.quantized_like(self.layers[layer])

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for store in (self.layers, self.in_bytes) for layer in store.values())

    def extend(self, layer: int, row: PrefillRow, k: Tensor) -> None:
        """Take in the keys of a prompt chunk, ``[chunk, kv_heads, head_dim]``, from where they were computed."""
        page_size, before = self._host.layers[layer].shape[3], row.seq_len - len(k)
        self._operations.extend_digests(k, self.layers[layer], row.written, before % page_size, page_size)
        whole = row.seq_len // page_size - before // page_size
        self._quantize(layer, row.written[:whole])

    def rebuild(self, layer: int, pages: Tensor) -> None:
        """Recompute digests of whole pages (``[n]`` host page ids) from the host pool."""
        ids = sent(pages.int(), self.layers[layer].device)
        counts = torch.full_like(ids, self._host.layers[layer].shape[3])
        self._operations.build_digests(self._host.views[layer], self.layers[layer], ids, counts)
        self._quantize(layer, pages)

    def _quantize(self, layer: int, pages: Tensor) -> None:
        if layer in self.in_bytes:
            native.quantize(self.in_bytes[layer], self.layers[layer], pages.long())
