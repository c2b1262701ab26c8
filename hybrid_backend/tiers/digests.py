"""Digests of all host pages: channel-wise max and min of K (Quest, arXiv 2406.10774, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels.cpu import digests as native
from hybrid_backend.step import sent
from hybrid_backend.tiers.host_pool import HostPool


def digest_shape(pages: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Of one layer's digests."""
    return (pages, kv_heads, 2, head_dim)


class Digests:
    """One digest per (layer, page, KV head), indexed by host page id, so that a prefix-cache hit finds it ready.

    ``layers[l]``: ``[pages, kv_heads, 2, head_dim]``; ``[..., 0, :]`` is the max, ``[..., 1, :]`` the min.
    Invariant: the digest of a page covers exactly the tokens written to it so far. A token at offset 0 makes a page
    new, whatever the page held before.

    ``in_bytes[l]``: the same digests in bytes (`kernels.native.quantize`), ``[pages, row]`` uint8, of whole pages
    only, if asked for.
    """

    def __init__(
        self, host: HostPool, layers: list[int], in_bytes: bool = False, device: torch.device | None = None
    ) -> None:
        self._host = host
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

    def append(self, layer: int, pages: Tensor, offsets: Tensor, keys: Tensor) -> None:
        """Fold one new key per page into its digest. ``keys``: ``[tokens, kv_heads, head_dim]``, pages distinct."""
        store = self.layers[layer]
        old = store[pages]
        fresh = (offsets == 0)[:, None, None]
        new = torch.stack(
            [
                torch.where(fresh, keys, torch.maximum(old[:, :, 0], keys)),
                torch.where(fresh, keys, torch.minimum(old[:, :, 1], keys)),
            ],
            2,
        )
        store[pages] = new

    def rebuild(self, layer: int, pages: Tensor, tokens: Tensor) -> None:
        """Recompute digests from the host pool. ``pages``: ``[n]``; ``tokens``: ``[n]`` valid tokens of each page."""
        if self.layers[layer].is_cuda:
            from hybrid_backend.kernels.triton import build_digests  # late: Triton is there where CUDA is

            lists = (sent(x.int(), self.layers[layer].device) for x in (pages, tokens))
            build_digests(self._host.seen[layer], self.layers[layer], *lists)
            return
        keys = self._host.layers[layer][pages, :, 0]  # [n, heads, page_size, dim]
        written = (torch.arange(keys.shape[2])[None] < tokens[:, None])[:, None, :, None]
        inf = float("inf")
        high = keys.masked_fill(~written, -inf).amax(2)
        low = keys.masked_fill(~written, inf).amin(2)
        self.layers[layer][pages] = torch.stack([high, low], 2)
        if layer in self.in_bytes:
            whole = pages[tokens == keys.shape[2]]
            native.quantize(self.in_bytes[layer], self.layers[layer], whole)
