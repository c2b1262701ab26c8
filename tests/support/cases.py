"""Random paged caches for the kernel tests."""

from __future__ import annotations

import torch
from torch import Tensor


def strided_layer(shape: tuple[int, ...], dtype: torch.dtype, pad: int, rng: torch.Generator) -> Tensor:
    """``[pages, kv_heads, 2, page_size, head_dim]`` whose rows are ``head_dim + pad`` apart and start unaligned."""
    *outer, dim = shape
    count = 1
    for extent in outer:
        count *= extent
    flat = torch.randn(count * (dim + pad) + pad, generator=rng).to(dtype)
    return flat[pad:].view(*outer, dim + pad)[..., :dim]


def page_lists(
    rows: int, lists: int, k: int, pages: int, page_size: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Lists of every length from 0 to ``k``, padding last, a ragged last page; ids distinct within a list."""
    ids = torch.stack([torch.randperm(pages, generator=rng)[:k] for _ in range(rows * lists)]).view(rows, lists, k)
    length = torch.randint(0, k + 1, (rows, lists, 1), generator=rng)
    column = torch.arange(k)
    valid = torch.full_like(ids, page_size)
    ragged = torch.randint(1, page_size + 1, (rows, lists, 1), generator=rng)
    valid = torch.where(column == length - 1, ragged, valid).masked_fill(column >= length, 0)
    return ids.masked_fill(column >= length, -1), valid


def spoil_beyond(layer: Tensor, ids: Tensor, valid: Tensor) -> None:
    """NaN where no token was written: nothing may read it."""
    page_size = layer.shape[3]
    written = torch.zeros(layer.shape[0], dtype=torch.int64)
    flat_ids, flat_valid = ids.flatten(), valid.flatten()
    for page, tokens in zip(flat_ids.tolist(), flat_valid.tolist(), strict=True):
        if page >= 0:
            written[page] = max(int(written[page]), tokens)
    beyond = torch.arange(page_size)[None] >= written[:, None]
    layer[beyond[:, None, None].expand(layer.shape[:4])] = float("nan")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    scale = expected.double().norm()
    return float((actual.double() - expected.double()).norm() / scale) if scale else float(actual.double().norm())


def byte_scores(q: Tensor, digests: Tensor, bound: float) -> Tensor:
    """Scores ``[n]`` of pages by digests in bytes, summed over all heads: digests and weights of the query are rounded.

    Args:
        q: ``[heads, head_dim]``.
        digests: ``[n, kv_heads, 2, head_dim]`` maxima and minima.
        bound: as in `Operations.page_scores`.
    """
    grouped = q.float().unflatten(0, (digests.shape[1], -1))
    half = bound * grouped.abs()
    weights = torch.stack([grouped + half, grouped - half], 2).sum(1) / 2  # [kv_heads, 2, head_dim]
    return torch.einsum("hxd,nhxd->n", _in_steps(weights), _in_steps(digests.float()))


def _in_steps(values: Tensor) -> Tensor:
    """Round each row to multiples of the 127th part of its largest magnitude."""
    step = values.abs().amax(-1, keepdim=True) / 127
    return (values * torch.where(step > 1e-37, 1 / step, 0.0)).round() * step
