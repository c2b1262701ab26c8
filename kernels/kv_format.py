"""KV format: layout, size and encoding of the pages that hold K and V.

Pools, frames, staging buffers, copies and all sizes ask `KvFormat`, so that what is planned is what is allocated. There
is one encoding: K and V as they are computed, in the model's dtype, without scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class KvFormat:
    """Format of one layer's pages: ``[pages, kv_heads, 2 (K, V), page_size, head_dim]`` in ``dtype``, contiguous."""

    kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: Tensor) -> KvFormat:
        """Return the format of a layer's pages.

        Raises:
            ValueError: the tensor has another layout.
        """
        if layer.dim() != 5 or layer.shape[2] != 2 or not layer.is_contiguous():
            raise ValueError(
                f"shape {tuple(layer.shape)} and strides {layer.stride()}; expected contiguous "
                "[pages, kv_heads, 2, page_size, head_dim]"
            )
        _, kv_heads, _, page_size, head_dim = layer.shape
        return cls(kv_heads, page_size, head_dim, layer.dtype)

    def with_heads(self, kv_heads: int) -> KvFormat:
        """Return the format of pages of another number of KV heads; of one head: a *head page*."""
        return replace(self, kv_heads=kv_heads)

    def shape(self, pages: int) -> tuple[int, int, int, int, int]:
        """Return the shape of ``pages`` pages."""
        return (pages, self.kv_heads, 2, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer: K and V of all KV heads."""
        return prod(self.shape(1)) * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.page_bytes // self.page_size

    def encode(self, k: Tensor, v: Tensor) -> Tensor:
        """Encode new tokens ``[tokens, kv_heads, head_dim]`` as pages hold them.

        Returns:
            ``[tokens, kv_heads, 2, head_dim]`` in ``dtype``.
        """
        return torch.stack([k, v], 2).to(self.dtype)

    def decode(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Decode pages.

        Args:
            pages: ``[..., 2, page_size, head_dim]`` in ``dtype``, any selection of pages and KV heads.

        Returns:
            K and V, ``[..., page_size, head_dim]`` fp32.
        """
        k, v = pages.float().unbind(-3)
        return k, v
