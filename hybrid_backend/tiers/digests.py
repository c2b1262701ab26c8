"""Digests of all host pages: channel-wise max and min of K (Quest, arXiv 2406.10774, section 3.2), or codes of it."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels.cpu import digests as native
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.step import sent
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.sizes import DigestKind, digest_store


class Digests:
    """One digest per (layer, page, KV head), indexed by host page id, so that a prefix-cache hit finds it ready.

    ``layers[l]``: ``[pages, kv_heads, 2, head_dim]``; ``[..., 0, :]`` is the max, ``[..., 1, :]`` the min.
    Invariant: the digest of a page covers exactly the tokens written to it so far. A token at offset 0 makes a page
    new, whatever the page held before. Or codes, ``[pages, kv_heads, 4 * head_dim]`` uint8 (`kernels.codes`): those of
    a page that is full are of its tokens, whatever it held before.

    ``in_bytes[l]``: the same digests in bytes (`kernels.cpu.digests.quantize`), ``[pages, row]`` uint8, of whole pages
    only, if asked for.
    """

    def __init__(
        self, host: HostPool, layers: list[int], operations: Operations, kind: DigestKind, device: torch.device
    ) -> None:
        self._host, self._operations = host, operations
        self.layers: dict[int, Tensor] = {}
        self.in_bytes: dict[int, Tensor] = {}
        for layer in layers:
            pages, heads, _, _, dim = host.layers[layer].shape
            shape, dtype = digest_store(kind, host.layers[layer].dtype, pages, heads, dim)
            self.layers[layer] = torch.zeros(shape, dtype=dtype, device=device)
            if kind == "minmax_int8":
                self.in_bytes[layer] = native.quantized_like(self.layers[layer])

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for store in (self.layers, self.in_bytes) for layer in store.values())

    def rebuild(self, layer: int, pages: Tensor, tokens: Tensor) -> None:
        """Recompute digests from the host pool. ``pages``: ``[n]``; ``tokens``: ``[n]`` valid tokens of each page."""
        store = self.layers[layer]
        ids, counts = (sent(x.int(), store.device) for x in (pages, tokens))
        self._operations.build_digests(self._host.views[layer], store, ids, counts)
        if layer in self.in_bytes:
            whole = pages[tokens == self._host.layers[layer].shape[3]]
            native.quantize(self.in_bytes[layer], store, whole)
