"""Digests in codes: an estimate of each token's key, in as many bytes as bf16 maxima and minima take.

The codes follow RaBitQ (arXiv 2405.12497) and its extension to more bits (2409.09913). A key is the middle of its
page's keys plus a residual. The residual is rotated, which spreads it evenly over the channels. Each rotated channel is
coded by two bits, by one bit (its sign), or not at all, as the bytes allow. A byte per token scales the codes, by least
squares.

A digest is a row of ``4 * head_dim`` bytes per (page, KV head) for every dtype of K; numbers are little-endian:

    [0, head_dim)      middle of each channel, (max + min) / 2, as a byte: round(middle / step) + 128
    3 fp32             step; spread, the root mean square of the channels' half-widths; unit of the tokens' scales
    page_size bytes    scale / unit of each token
    planes * page_size of each 16 tokens plane by plane: plane i, byte t is code 2i (low nibble) and 2i + 1 of token t

A code of 4 bits stands for two channels of two bits, or for four channels of one bit; channels of two bits come first.
The rest of the row is not used. Only whole pages have a digest; a page that grows is always attended.

A page's estimate is the log-sum-exp of its tokens' estimated logits. Each logit is raised by half of the variance that
the codes leave (``distortion * scale ** 2`` of each channel, times |q| ** 2), so that the estimated weight is unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LARGEST = 1e17
"""Largest magnitude of a key's elements; larger ones count as 0, so that no square overflows."""
HEADER = 12
"""Bytes of the three numbers after the middles."""
FINE, INNER, OUTER, COARSE = 0.9816, 0.4528, 1.5104, 0.7979
"""Best levels for a normal variable (Lloyd, Max): the magnitude of two bits is `INNER` below `FINE` and `OUTER` above,
that of one bit is `COARSE`."""
FINE_LOSS, COARSE_LOSS = 0.1175, 0.3634
"""Mean squared errors of two bits and of one bit."""


@dataclass(frozen=True)
class Layout:
    """Layout of a digest, and the number of bits of each channel."""

    page_size: int
    dim: int
    """head_dim."""

    @property
    def row(self) -> int:
        """Size of a digest in bytes, per (page, KV head)."""
        return 4 * self.dim

    @property
    def planes(self) -> int:
        """Bytes of codes per token; 0 where the row is too short to hold any."""
        room = self.row - self.dim - HEADER - self.page_size
        return max(0, min(room // self.page_size, self.dim // 4))

    @property
    def fine(self) -> int:
        """Number of rotated channels of two bits, which are the first ones."""
        return max(0, 8 * self.planes - self.dim)

    @property
    def coded(self) -> int:
        """Number of rotated channels that have a code."""
        return min(self.dim, 8 * self.planes)

    @property
    def distortion(self) -> float:
        """Variance that the codes leave, as a share of the residual's variance."""
        lost = self.fine * FINE_LOSS + (self.coded - self.fine) * COARSE_LOSS + self.dim - self.coded
        return lost / self.dim


@cache
def rotation(dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the orthogonal matrix ``[dim, dim]`` fp32 that rotates by ``x @ rotation``.

    The rotation flips signs, then applies Hadamard's transform to blocks of the largest power of two that divides
    ``dim``.
    """
    block = dim & -dim
    transform = torch.ones(1, 1)
    while len(transform) < block:
        transform = torch.cat([torch.cat([transform, transform], 1), torch.cat([transform, -transform], 1)])
    flips = torch.tensor([1.0 if (i * 2654435761 >> 16) & 1 else -1.0 for i in range(dim)])
    return (flips[:, None] * torch.kron(torch.eye(dim // block), transform / block**0.5)).to(device)


def encode(keys: Tensor) -> Tensor:
    """Encode keys ``[..., page_size, head_dim]`` of any dtype as digests ``[..., row]`` uint8; NaN counts as 0."""
    layout = Layout(*keys.shape[-2:])
    fine, coded = layout.fine, layout.coded
    x = keys.float()
    x = torch.where(x.abs() < LARGEST, x, 0.0)
    high, low = x.amax(-2), x.amin(-2)
    middle, half = (high + low) / 2, (high - low) / 2
    step = middle.abs().amax(-1, keepdim=True) / 127
    bytes_ = (middle * inverse(step)).round()
    y = (x - (bytes_ * step)[..., None, :]) @ rotation(layout.dim)
    size = (y * y).mean(-1, keepdim=True).sqrt()
    signs = y >= 0
    outer = y.abs() > FINE * size
    levels = torch.where(outer, OUTER, INNER)
    levels[..., fine:coded] = COARSE
    levels[..., coded:] = 0.0
    levels = levels.where(signs, -levels)
    scales = (y * levels).sum(-1) / (levels * levels).sum(-1)
    unit = scales.amax(-1, keepdim=True) / 255
    two = 2 * signs.int() + (outer == signs).int()  # ascending levels
    pairs = two[..., :fine].unflatten(-1, (-1, 2)) * torch.tensor([1, 4])
    fours = signs[..., fine:coded].unflatten(-1, (-1, 4)) * torch.tensor([1, 2, 4, 8])
    codes = torch.cat([pairs.sum(-1), fours.sum(-1)], -1).unflatten(-1, (-1, 2))
    planes = (codes * torch.tensor([1, 16])).sum(-1).unflatten(-2, (-1, 16)).transpose(-1, -2)
    spread = (half * half).mean(-1, keepdim=True).sqrt()
    numbers = torch.cat([step, spread, unit], -1).view(torch.uint8)
    tokens = (scales * inverse(unit)).round()
    pieces = [bytes_ + 128, numbers, tokens, planes.flatten(-3)]
    row = torch.cat([part.to(torch.uint8) for part in pieces], -1)
    return torch.nn.functional.pad(row, (0, layout.row - row.shape[-1]))


def decode(rows: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decode digests ``[..., row]`` uint8.

    Returns:
        ``(middles [..., head_dim], spread [...], scales [..., page_size], levels [..., page_size, head_dim])`` fp32.
        Levels are those of rotated channels, not yet scaled.
    """
    layout = Layout(page_size, rows.shape[-1] // 4)
    dim, fine = layout.dim, layout.fine
    start = dim + HEADER
    step, spread, unit = rows[..., dim:start].contiguous().view(torch.float32).unbind(-1)
    middles = (rows[..., :dim].float() - 128) * step[..., None]
    scales = rows[..., start : start + page_size].float() * unit[..., None]
    end = start + (1 + layout.planes) * page_size
    planes = rows[..., start + page_size : end].unflatten(-1, (page_size // 16, layout.planes, 16)).int()
    planes = planes.transpose(-1, -2).flatten(-3, -2)  # [..., page_size, planes]
    codes = torch.stack([planes % 16, planes // 16], -1).flatten(-2)
    two = torch.stack([codes[..., : fine // 2] % 4, codes[..., : fine // 2] // 4], -1).flatten(-2)
    one = (codes[..., fine // 2 :, None] >> torch.arange(4)) % 2
    levels = [
        torch.tensor([-OUTER, -INNER, INNER, OUTER])[two],
        (2 * one.flatten(-2) - 1) * COARSE,
        rows.new_zeros(*codes.shape[:-1], dim - layout.coded, dtype=torch.float32),
    ]
    return middles, spread, scales, torch.cat(levels, -1)


def estimates(q: Tensor, rows: Tensor, page_size: int, scale: float) -> Tensor:
    """Estimate the log-sum-exp of the scaled logits of each page's tokens.

    Args:
        q: queries ``[..., head_dim]``.
        rows: digests ``[..., row]`` uint8.
        page_size: tokens of a page.
        scale: factor of the logits.

    Returns:
        ``[...]`` fp32, in natural log.
    """
    layout = Layout(page_size, q.shape[-1])
    middles, _, scales, levels = decode(rows, page_size)
    q = q.float()
    codes = (levels @ (q @ rotation(layout.dim))[..., None])[..., 0]
    logits = scale * ((q * middles).sum(-1, keepdim=True) + scales * codes)
    variance = layout.distortion * scale**2 * (q * q).sum(-1, keepdim=True) * scales**2
    return (logits + variance / 2).logsumexp(-1)


def inverse(x: Tensor) -> Tensor:
    """Return ``1 / x``, or 0 where that would overflow."""
    return torch.where(x > 1e-37, 1 / x, 0.0)
