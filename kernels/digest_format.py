"""Digest formats: content and size of a page's digest, and how it is computed and scored.

A digest describes the keys of one page and one KV head. Formats are immutable and compared by identity. The tensors
of a layer are:

* `DigestFormat.shape` in `DigestFormat.dtype`: one digest per (page, KV head), which the operations read and write.
* `DigestFormat.has_byte_copy`: of whole pages also byte digests ``[pages, byte_digests.page_row]`` uint8, a page's KV
  heads in one row, which the native decoder scores (`kernels.cpu.digests`).

All three implementations of the operations know `MINMAX`, `CODES` and `MINMAX_INT8`, and tell them apart by
`digest_format_of`. C++ knows each by its `DigestFormat.number` (src/api.h).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from hybrid_backend.kernels import byte_digests, codes


class DigestFormat(ABC):
    """Format of the digest of one page and one KV head."""

    name: ClassVar[str]
    number: ClassVar[int]
    """Number by which C++ knows the tensor that operations read."""
    covers_growing_pages: ClassVar[bool] = False
    """A page has a digest from its first token on; else only whole pages have one."""
    has_byte_copy: ClassVar[bool] = False
    """The native decoder scores byte digests, which lie beside the digests."""
    shortlists: ClassVar[int] = 1
    """Lists of pages that the native decoder keeps per row between two looks at all pages."""

    @abstractmethod
    def head_shape(self, head_dim: int) -> tuple[int, ...]:
        """Return the shape of one digest."""

    @abstractmethod
    def encode(self, keys: Tensor) -> Tensor:
        """Compute the digests of whole pages.

        Args:
            keys: ``[..., page_size, head_dim]`` of any dtype.

        Returns:
            ``[..., *head_shape]``.
        """

    @abstractmethod
    def estimates(self, q: Tensor, digests: Tensor, bound: float, scale: float, page_size: int) -> Tensor:
        """Estimate the logit by which each page contributes, not scaled (`SelectionOperations.page_scores`).

        Args:
            q: queries ``[rows, kv_heads, group, head_dim]`` fp32.
            digests: ``[rows, pages, kv_heads, *head_shape]``.
            bound: position of the estimate in the range that a digest of maxima and minima allows.
            scale: factor of the logits in the attention's softmax.
            page_size: tokens of a page.

        Returns:
            ``[rows, kv_heads, group, pages]`` fp32.
        """

    def dtype(self, kv_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of digests of keys in ``kv_dtype``."""
        return torch.uint8

    def fits(self, page_size: int, head_dim: int) -> bool:
        """Tell whether a digest has room for what it holds of ``page_size`` tokens."""
        return True

    def shape(self, pages: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of one layer's digests."""
        return (pages, kv_heads, *self.head_shape(head_dim))

    def page_bytes(self, kv_dtype: torch.dtype, kv_heads: int, head_dim: int) -> int:
        """Return the bytes of one page's digests in one layer, the byte copy included."""
        copy = byte_digests.page_row(kv_heads, head_dim) if self.has_byte_copy else 0
        return prod(self.shape(1, kv_heads, head_dim)) * self.dtype(kv_dtype).itemsize + copy


class MinMax(DigestFormat):
    """Channel-wise maximum and minimum of K in the dtype of K (Quest, arXiv 2406.10774, section 3.2)."""

    name = "minmax"
    number = 0
    covers_growing_pages = True

    def head_shape(self, head_dim: int) -> tuple[int, ...]:
        return (2, head_dim)

    def dtype(self, kv_dtype: torch.dtype) -> torch.dtype:
        return kv_dtype

    def encode(self, keys: Tensor) -> Tensor:
        return torch.stack([keys.amax(-2), keys.amin(-2)], -2)

    def estimates(self, q: Tensor, digests: Tensor, bound: float, scale: float, page_size: int) -> Tensor:
        half = bound * q.abs()
        weights = torch.stack([q + half, q - half], 3) / 2  # Weights of the maxima and of the minima.
        return torch.einsum("rhgxd,rchxd->rhgc", weights, digests.float())


class MinMaxAndInt8(MinMax):
    """Maxima and minima in the dtype of K, and the same in bytes, which the native decoder scores."""

    name = "minmax_and_int8"
    has_byte_copy = True


class MinMaxInt8(MinMax):
    """Maxima and minima rounded to 8 bits (`byte_digests`)."""

    name = "minmax_int8"
    number = 2
    covers_growing_pages = False

    def head_shape(self, head_dim: int) -> tuple[int, ...]:
        return (byte_digests.row(head_dim),)

    def dtype(self, kv_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def encode(self, keys: Tensor) -> Tensor:
        return byte_digests.encode(super().encode(keys))

    def estimates(self, q: Tensor, digests: Tensor, bound: float, scale: float, page_size: int) -> Tensor:
        return super().estimates(q, byte_digests.decode(digests), bound, scale, page_size)


class Codes(DigestFormat):
    """Codes of every token's key (`codes`)."""

    name = "codes"
    number = 1
    shortlists = 2

    def head_shape(self, head_dim: int) -> tuple[int, ...]:
        return (4 * head_dim,)

    def fits(self, page_size: int, head_dim: int) -> bool:
        return codes.Layout(page_size, head_dim).planes > 0

    def encode(self, keys: Tensor) -> Tensor:
        return codes.encode(keys)

    def estimates(self, q: Tensor, digests: Tensor, bound: float, scale: float, page_size: int) -> Tensor:
        rows = digests.transpose(1, 2)[:, :, None]
        return codes.estimates(q[:, :, :, None], rows, page_size, scale) / scale


MINMAX, CODES, MINMAX_INT8, MINMAX_AND_INT8 = MinMax(), Codes(), MinMaxInt8(), MinMaxAndInt8()

_BY_NAME: Mapping[str, DigestFormat] = MappingProxyType({x.name: x for x in (MINMAX, MINMAX_INT8, CODES)})


def format_named(name: str, automatic: DigestFormat = MINMAX_INT8) -> DigestFormat:
    """Return the format that a value of ``selection.digest`` names; ``auto`` stands for ``automatic``."""
    return automatic if name == "auto" else _BY_NAME[name]


def digest_format_of(digests: Tensor, head_dim: int) -> DigestFormat:
    """Return the format of ``digests``, which operations read, by their dtype and shape."""
    if digests.dtype != torch.uint8:
        return MINMAX
    return CODES if digests.shape[-1] == 4 * head_dim else MINMAX_INT8
