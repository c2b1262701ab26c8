"""Sparse paged decode on the device: partial attention over listed pages, and the weights that it is made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.triton.common import dot, group_block, precision_of

_TILE = 64  # tokens of K and V that a program holds at a time
_MAX_SPLITS = 32


@triton.jit
def _tile_of_keys(kv, ids, first, count, head, PAGE: tl.constexpr, DIM: tl.constexpr, KV_HEADS: tl.constexpr,
                  TILE: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Offsets of the K rows of the listed tokens ``first .. first + TILE``, and which of them count."""
    token = first + tl.arange(0, TILE)
    listed = token < count
    page = tl.load(ids + token // PAGE, mask=listed, other=0).to(tl.int64)
    row = ((page * KV_HEADS + head) * 2 * PAGE + token % PAGE) * DIM
    channel = tl.arange(0, BLOCK_D)
    return row[:, None] + channel[None, :], listed, listed[:, None] & (channel < DIM)[None, :]


@triton.jit(do_not_specialize=["k", "splits"])
def _partial_kernel(q, kv, ids, tokens, out, lse, scale, k, splits,
                    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                    PER_HEAD: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    listing = row * KV_HEADS + head if PER_HEAD else row
    ids += listing * k
    count = tl.load(tokens + listing)
    share = tl.cdiv(tl.cdiv(count, TILE), splits) * TILE
    first = split * share
    end = tl.minimum(first + share, count)

    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = row * KV_HEADS * GROUP + head * GROUP + g
    live = (g < GROUP)[:, None] & (d < DIM)[None, :]
    query = tl.load(q + heads[:, None] * DIM + d[None, :], mask=live, other=0.0)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first, end, TILE):
        at, listed, mask = _tile_of_keys(kv, ids, start, end, head, PAGE, DIM, KV_HEADS, TILE, BLOCK_D)
        keys = tl.load(kv + at, mask=mask, other=0.0)
        logits = dot(query, tl.trans(keys), PRECISION) * (scale * 1.4426950408889634)
        logits = tl.where(listed[None, :], logits, float("-inf"))
        new = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # every logit -inf so far: no NaN
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(highest - base)
        values = tl.load(kv + at + PAGE * DIM, mask=mask, other=0.0)
        sums = sums * shrink[:, None] + dot(weights.to(values.dtype), values, PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        highest = new
    some = total > 0
    sums = sums / tl.where(some, total, 1.0)[:, None]
    found = tl.where(some, highest * 0.6931471805599453 + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    to = heads * splits + split
    tl.store(out + to[:, None] * DIM + d[None, :], sums, mask=live)
    tl.store(lse + to, found, mask=g < GROUP)


@triton.jit(do_not_specialize=["k"])
def _weights_kernel(q, kv, ids, tokens, lse, average, scale, alpha, k,
                    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                    LARGEST: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    row, head, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * TILE
    ids += row * k
    count = tl.load(tokens + row)
    if first < count:
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        heads = row * KV_HEADS * GROUP + head * GROUP + g
        live = (g < GROUP)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + heads[:, None] * DIM + d[None, :], mask=live, other=0.0)
        at, listed, mask = _tile_of_keys(kv, ids, first, count, head, PAGE, DIM, KV_HEADS, TILE, BLOCK_D)
        keys = tl.load(kv + at, mask=mask, other=0.0)
        logits = dot(query, tl.trans(keys), PRECISION) * scale
        shares = tl.exp(logits - tl.load(lse + heads, mask=g < GROUP, other=0.0)[:, None])
        shares = tl.where((g < GROUP)[:, None], shares, 0.0)
        new = tl.max(shares, 0) if LARGEST else tl.sum(shares, 0) / GROUP
        token = first + tl.arange(0, TILE)
        page = tl.load(ids + token // PAGE, mask=listed, other=0).to(tl.int64)
        to = average + (page * KV_HEADS + head) * PAGE + token % PAGE
        tl.store(to, (1 - alpha) * tl.load(to, mask=listed, other=0.0) + alpha * new, mask=listed)


def splits_for(rows: int, kv_heads: int, most_tokens: int, processors: int) -> int:
    """Parts in which each row's list is attended side by side, so that a small batch fills the device as well.

    Args:
        most_tokens: that a list can hold (a bound, so that a captured graph keeps its shape).
        processors: streaming multiprocessors of the device.
    """
    wanted = 2 * processors // max(1, rows * kv_heads)
    return max(1, min(wanted, _MAX_SPLITS, -(-most_tokens // (4 * _TILE))))


def paged_partial(
    q: Tensor,
    kv: Tensor,
    ids: Tensor,
    tokens: Tensor,
    scale: float,
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attention of one query token per row over its listed pages; every K and V row is read once for its whole group
    of query heads.

    Args:
        q: ``[rows, heads, head_dim]``.
        kv: ``[pages, kv_heads, 2, page_size, head_dim]``, contiguous (slots, or host pages that the device sees).
        ids: ``[rows, 1 | kv_heads, k]`` int32; what lies beyond the listed tokens is not read.
        tokens: ``[rows, 1 | kv_heads]`` int32, tokens of each list: all its pages are full but the last one.
        scale: multiplies the logits.
        splits: see `splits_for`.

    Returns:
        ``(out [rows, heads, splits, head_dim], lse [rows, heads, splits])`` fp32, natural log: one partial per part
        of the list, for `merge_partials`. A part without tokens is out 0, lse -inf.
    """
    rows, heads, dim = q.shape
    kv_heads, page = kv.shape[1], kv.shape[3]
    out = q.new_empty(rows, heads, splits, dim, dtype=torch.float32)
    lse = q.new_empty(rows, heads, splits, dtype=torch.float32)
    if rows:
        group = heads // kv_heads
        _partial_kernel[(rows, kv_heads, splits)](
            q, kv, ids, tokens, out, lse, scale, ids.shape[2], splits,
            kv_heads, group, page, dim, ids.shape[1] > 1, _TILE,
            group_block(group), triton.next_power_of_2(dim), precision_of(q.dtype),
        )  # fmt: skip
    return out, lse


def page_weights(
    q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor, lse: Tensor, average: Tensor, scale: float, alpha: float,
    largest: bool,
) -> None:  # fmt: skip
    """HGCA's moving averages of attention weights (algorithm 1): ``A = (1 - alpha) A + alpha A_new`` for every listed
    token and KV head, where ``A_new`` is the mean (or the largest) softmax share over the KV head's query heads.

    Args:
        q, kv, scale: as in `paged_partial`.
        ids: ``[rows, 1, k]`` int32 slots; ``tokens``: ``[rows, 1]`` int32.
        lse: ``[rows, heads]`` fp32 of the attention over these tokens.
        average: ``[slots, kv_heads, page_size]`` fp32, updated in place.
    """
    rows, heads, dim = q.shape
    kv_heads, page = kv.shape[1], kv.shape[3]
    tiles = triton.cdiv(ids.shape[2] * page, _TILE)
    if rows and tiles:
        group = heads // kv_heads
        _weights_kernel[(rows, kv_heads, tiles)](
            q, kv, ids, tokens, lse, average, scale, alpha, ids.shape[2],
            kv_heads, group, page, dim, largest, _TILE,
            group_block(group), triton.next_power_of_2(dim), precision_of(q.dtype),
        )  # fmt: skip
