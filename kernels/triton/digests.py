"""Digests of pages: channel-wise max and min of K."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _build_kernel(kv, digests, ids, tokens, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                  BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    page = tl.load(ids + i).to(tl.int64)
    count = tl.load(tokens + i)
    if (page >= 0) & (count > 0):
        t, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
        written = (t < count)[:, None] & (d < DIM)[None, :]
        at = (page * KV_HEADS + head) * 2 * PAGE * DIM + t[:, None] * DIM + d[None, :]
        keys = tl.load(kv + at, mask=written, other=0.0).to(tl.float32)
        high = tl.max(tl.where(written, keys, float("-inf")), 0)
        low = tl.min(tl.where(written, keys, float("inf")), 0)
        to = digests + (page * KV_HEADS + head) * 2 * DIM + d
        kind = digests.dtype.element_ty
        tl.store(to, high.to(kind), mask=d < DIM)
        tl.store(to + DIM, low.to(kind), mask=d < DIM)


def build_digests(kv: Tensor, digests: Tensor, ids: Tensor, tokens: Tensor) -> None:
    """Compute digests anew (after a prompt chunk, or pages that came from elsewhere).

    Args:
        kv: ``[pages, kv_heads, 2, page_size, head_dim]``.
        digests: ``[pages, kv_heads, 2, head_dim]``, same dtype, updated in place.
        ids: ``[n]`` int32 pages, -1: none; ``tokens``: ``[n]`` int32 tokens of each that were written.
    """
    _, kv_heads, _, page, dim = kv.shape
    if len(ids):
        _build_kernel[(len(ids), kv_heads)](
            kv, digests, ids, tokens, kv_heads, page, dim, triton.next_power_of_2(page), triton.next_power_of_2(dim)
        )
