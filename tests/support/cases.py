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
