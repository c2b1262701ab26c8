"""A page's digest in bytes: channel-wise max and min of K, rounded to the 127th part of the widest channel.

A row of ``2 * head_dim + 16`` bytes per (page, KV head), half of what bf16 takes:

    head_dim bytes each of max and min: round(value / scale) + 128
    2 fp32             scale of each, little-endian: its largest magnitude / 127
    8 bytes            not used, so that rows begin at multiples of 16

What is not finite counts as 0. Only whole pages have a digest: a page that grows is always attended.
"""

from __future__ import annotations

import torch
from torch import Tensor

TAIL = 16
"""Bytes after the channels."""


def row(head_dim: int) -> int:
    """Bytes per (page, KV head)."""
    return 2 * head_dim + TAIL


def encode(digests: Tensor) -> Tensor:
    """Rows ``[..., row]`` uint8 of maxima and minima ``[..., 2, head_dim]``."""
    values = digests.float()
    values = torch.where(values.isfinite(), values, 0.0)
    scales = values.abs().amax(-1) / 127  # [..., 2]
    inverse = torch.where(scales > 1e-37, 1 / scales, 0.0)
    rounded = ((values * inverse[..., None]).round() + 128).to(torch.uint8).flatten(-2)
    tail = torch.cat([scales, torch.zeros_like(scales)], -1)
    return torch.cat([rounded, tail.view(torch.uint8)], -1)


def decode(rows: Tensor) -> Tensor:
    """What ``rows`` stand for: ``[..., 2, head_dim]`` fp32."""
    values = rows[..., :-TAIL].unflatten(-1, (2, -1)).float() - 128
    scales = rows[..., -TAIL : -TAIL // 2].contiguous().view(torch.float32)
    return torch.mul(values, scales[..., None])
