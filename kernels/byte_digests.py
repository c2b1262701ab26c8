"""Digests in bytes: channel-wise maximum and minimum of a page's keys, rounded to 8 bits.

A digest is a row of ``2 * head_dim + 16`` bytes per (page, KV head), half the size of a bf16 digest:

    2 * head_dim bytes  maxima, then minima: round(value / scale) + 128
    2 fp32              scale of the maxima and of the minima, little-endian: their largest magnitude / 127
    8 bytes             not used, so that rows begin at multiples of 16

Values that are not finite count as 0. Only whole pages have such a digest; a page that grows is always attended.
"""

from __future__ import annotations

import torch
from torch import Tensor

TAIL = 16
"""Bytes after the channels: scales and padding."""


def row(head_dim: int) -> int:
    """Return the size of a digest in bytes, per (page, KV head)."""
    return 2 * head_dim + TAIL


def page_row(kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a page's digests of all KV heads as the native decoder reads them (src/api.h).

    All values come first, then all scales; rows are padded to whole cache lines.
    """
    return -(-(kv_heads * 2 * (head_dim + 4)) // 64) * 64


def encode(digests: Tensor) -> Tensor:
    """Encode maxima and minima ``[..., 2, head_dim]``, of any dtype, as digests ``[..., row]`` uint8."""
    values = digests.float()
    values = torch.where(values.isfinite(), values, 0.0)
    scales = values.abs().amax(-1) / 127  # [..., 2]
    inverse = torch.where(scales > 1e-37, 1 / scales, 0.0)
    rounded = ((values * inverse[..., None]).round() + 128).to(torch.uint8).flatten(-2)
    tail = torch.cat([scales, torch.zeros_like(scales)], -1)
    return torch.cat([rounded, tail.view(torch.uint8)], -1)


def decode(rows: Tensor) -> Tensor:
    """Decode digests ``[..., row]`` uint8 to maxima and minima ``[..., 2, head_dim]`` fp32."""
    values = rows[..., :-TAIL].unflatten(-1, (2, -1)).float() - 128
    scales = rows[..., -TAIL : -TAIL // 2].contiguous().view(torch.float32)
    return torch.mul(values, scales[..., None])
