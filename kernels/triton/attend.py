"""Attention of a decode step: partials over listed pages, averages of attention weights, and the exact merge."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.kv_format import head_dim_of
from hybrid_backend.kernels.operations import check_one_query
from hybrid_backend.kernels.triton.common import dot, group_block, kernel, precision_of
from hybrid_backend.kernels.triton.encoding import numbers, scales_at, weighed

_TILE = 64  # tokens that a program attends at once, at most
_WIDE_ROW = 256  # bytes of a row of K; two tiles of such rows of K and of V fit the shared memory since sm_80
_MAX_PARTS = 32
_BUSY = 0.85  # busy share of the processors' time above which lists are not cut further


@triton.jit
def _pages_of_tile(ids, first, count, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return the page of each of the tokens ``first .. first + TILE``."""
    token = first + tl.arange(0, TILE)
    page = token // PAGE
    if ids is not None:
        page = tl.load(ids + page, mask=token < count, other=0)
    return page


@triton.jit
def _tile_of_keys(kv, page, first, count, head, PAGE: tl.constexpr, DIM: tl.constexpr, KV_HEADS: tl.constexpr,
                  TILE: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Return the offsets of the K rows of the tokens ``first .. first + TILE``, and the masks of listed tokens.

    ``page`` comes from `_pages_of_tile`, and ``head`` is one of the ``KV_HEADS`` heads of a page of ``kv``. The last
    result points to the scales of keys in 8 bits.
    """
    token = first + tl.arange(0, TILE)
    listed, page = token < count, page.to(tl.int64)
    head_page, slot = page * KV_HEADS + head, token % PAGE
    if kv.dtype.element_ty == tl.int8:
        row, scale_at = head_page * (2 * PAGE * (DIM + 2)) + slot * DIM, scales_at(kv, head_page, slot, PAGE, DIM)
    else:
        row, scale_at = (head_page * 2 * PAGE + slot) * DIM, slot
    channel = tl.arange(0, BLOCK_D)
    return row[:, None] + channel[None, :], listed, listed[:, None] & (channel < DIM)[None, :], scale_at


@kernel("q", "kv", "out")
def _partial_kernel(q, kv, ids, tokens, begins, out, lse, scale, row_stride, list_stride, num_parts, all_parts,
                    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                    PER_HEAD: tl.constexpr, STORE_HEADS: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr,
                    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    ENCODED: tl.constexpr = kv.dtype.element_ty == tl.int8
    if ids is not None:
        ids += row * row_stride
        if PER_HEAD:
            ids += head * list_stride
    line = row * KV_HEADS + head if PER_HEAD else row
    begin, count = tl.zeros([], tl.int32), tl.load(tokens + line)
    if begins is not None:
        begin = tl.load(begins + line)
    share = tl.cdiv(tl.cdiv(count - begin, TILE), num_parts) * TILE
    first = begin + part * share
    end = tl.minimum(first + share, count)
    store_head = head if STORE_HEADS == KV_HEADS else 0  # Head pages have a single head.

    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = row * KV_HEADS * GROUP + head * GROUP + g
    live = (g < GROUP)[:, None] & (d < DIM)[None, :]
    query = tl.load(q + heads[:, None] * DIM + d[None, :], mask=live, other=0.0)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    page = _pages_of_tile(ids, first, end, PAGE, TILE)
    for start in range(first, end, TILE):
        offsets, listed, mask, scale_at = _tile_of_keys(
            kv, page, start, end, store_head, PAGE, DIM, STORE_HEADS, TILE, BLOCK_D
        )
        # The next tile's pages are loaded a tile early, so that its K and V can be requested during this tile's math.
        page = _pages_of_tile(ids, start + TILE, end, PAGE, TILE)
        keys = numbers(tl.load(kv + offsets, mask=mask, other=0.0), query)
        logits = dot(query, tl.trans(keys), PRECISION) * (scale * 1.4426950408889634)
        if ENCODED:
            logits *= tl.load(scale_at, mask=listed, other=0.0).to(tl.float32)[None, :]
        logits = tl.where(listed[None, :], logits, float("-inf"))
        new = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # avoids NaN while every logit is -inf
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(highest - base)
        values = numbers(tl.load(kv + offsets + PAGE * DIM, mask=mask, other=0.0), query)
        if ENCODED:
            value_scales = tl.load(scale_at + PAGE, mask=listed, other=0.0).to(tl.float32)
            sums = sums * shrink[:, None] + weighed(weights, values, value_scales, PRECISION)
        else:
            sums = sums * shrink[:, None] + dot(weights.to(values.dtype), values, PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        highest = new
    some = total > 0
    sums = sums / tl.where(some, total, 1.0)[:, None]
    part_lse = tl.where(some, highest * 0.6931471805599453 + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    to = heads * all_parts + part
    tl.store(out + to[:, None] * DIM + d[None, :], sums, mask=live)
    tl.store(lse + to, part_lse, mask=g < GROUP)


@kernel("q", "kv")
def _weights_kernel(q, kv, ids, places, tokens, lse, average, scale, alpha, row_stride, place_stride,
                    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                    LARGEST: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    row, head, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * TILE
    ids += row * row_stride
    count = tl.load(tokens + row)
    if first < count:
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        heads = row * KV_HEADS * GROUP + head * GROUP + g
        live = (g < GROUP)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + heads[:, None] * DIM + d[None, :], mask=live, other=0.0)
        page = _pages_of_tile(ids, first, count, PAGE, TILE)
        offsets, listed, mask, scale_at = _tile_of_keys(
            kv, page, first, count, head, PAGE, DIM, KV_HEADS, TILE, BLOCK_D
        )
        keys = numbers(tl.load(kv + offsets, mask=mask, other=0.0), query)
        logits = dot(query, tl.trans(keys), PRECISION) * scale
        if kv.dtype.element_ty == tl.int8:
            logits *= tl.load(scale_at, mask=listed, other=0.0).to(tl.float32)[None, :]
        shares = tl.exp(logits - tl.load(lse + heads, mask=g < GROUP, other=0.0)[:, None])
        shares = tl.where((g < GROUP)[:, None], shares, 0.0)
        new = tl.max(shares, 0) if LARGEST else tl.sum(shares, 0) / GROUP
        token = first + tl.arange(0, TILE)
        place = tl.load(places + row * place_stride + token // PAGE, mask=listed, other=0).to(tl.int64)
        to = average + (place * KV_HEADS + head) * PAGE + token % PAGE
        tl.store(to, (1 - alpha) * tl.load(to, mask=listed, other=0.0) + alpha * new, mask=listed)


def parts_for(rows: int, kv_heads: int, most_tokens: int, processors: int) -> int:
    lists, most = max(1, rows * kv_heads), max(1, min(_MAX_PARTS, -(-most_tokens // (4 * _TILE))))
    for num_parts in range(1, most):
        programs = lists * num_parts
        # All processors wait for the one that has most programs.
        busy = programs / (-(-programs // processors) * processors)
        if programs >= 2 * processors and busy >= _BUSY:
            return num_parts
    return most


def _tile_of(kv: Tensor, dtype: torch.dtype) -> int:
    """Return the tokens of K and V that a program of `paged_partial` attends at once, for queries of ``dtype``.

    The larger a row of K is, the fewer rows fit the registers without spills. Tensor cores need 16.
    """
    row_bytes = int(triton.next_power_of_2(head_dim_of(kv))) * dtype.itemsize
    if kv.dtype is not torch.int8:
        return _TILE if row_bytes <= _WIDE_ROW else 16
    if dtype == torch.float32:
        return 16
    return _TILE if row_bytes <= _WIDE_ROW else _TILE // 2


def paged_partial(
    q: Tensor, kv: Tensor, ids: Tensor | None, tokens: Tensor, scale: float, num_parts: int = 1,
    query_start: Tensor | None = None, begins: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if query_start is not None:
        check_one_query(query_start, len(tokens))
    rows, heads, dim = q.shape
    lists, kv_heads, page_size = tokens.shape[1], max(kv.shape[1], tokens.shape[1]), kv.shape[3]
    if into is None:
        out = q.new_empty(rows, heads, num_parts, dim, dtype=torch.float32)
        into = out, q.new_empty(rows, heads, num_parts, dtype=torch.float32)
    out, lse = into
    if rows:
        group = heads // kv_heads
        row_stride, list_stride = (0, 0) if ids is None else (ids.stride(0), ids.stride(1) * (ids.shape[1] > 1))
        _partial_kernel[(rows, kv_heads, num_parts)](
            q, kv, ids, tokens, begins, out, lse, scale, row_stride, list_stride, num_parts, lse.stride(1),
            kv_heads, group, page_size, dim, lists > 1, kv.shape[1], _tile_of(kv, q.dtype),
            group_block(group), triton.next_power_of_2(dim), precision_of(q.dtype),
        )  # fmt: skip
    return out, lse


def page_weights(
    q: Tensor, kv: Tensor, ids: Tensor, places: Tensor, tokens: Tensor, lse: Tensor, average: Tensor,
    scale: float, alpha: float, largest: bool,
) -> None:  # fmt: skip
    rows, heads, dim = q.shape
    kv_heads, page_size = kv.shape[1], kv.shape[3]
    tiles = triton.cdiv(ids.shape[2] * page_size, _TILE)
    if rows and tiles:
        group = heads // kv_heads
        _weights_kernel[(rows, kv_heads, tiles)](
            q, kv, ids, places, tokens, lse, average, scale, alpha, ids.stride(0), places.stride(0),
            kv_heads, group, page_size, dim, largest, _TILE,
            group_block(group), triton.next_power_of_2(dim), precision_of(q.dtype),
        )  # fmt: skip


@kernel("out", "extra_out", "merged")
def _merge_kernel(out, lse, extra_out, extra_lse, sinks, merged, merged_lse, heads, num_parts, DIM: tl.constexpr,
                  BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, HAS_EXTRA: tl.constexpr,
                  HAS_SINKS: tl.constexpr):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)  # one query head of one row
    p, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    live = d < DIM
    part_lse = tl.load(lse + item * num_parts + p, mask=p < num_parts, other=float("-inf"))
    highest = tl.max(part_lse, 0)
    if HAS_EXTRA:
        extra = tl.load(extra_lse + item)
        highest = tl.maximum(highest, extra)
    if HAS_SINKS:
        sink = tl.load(sinks + item % heads)
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # avoids NaN where all partials are empty
    weights = tl.exp(part_lse - base)
    total = tl.sum(weights, 0)
    values = tl.load(out + (item * num_parts + p)[:, None] * DIM + d[None, :],
                     mask=(p < num_parts)[:, None] & live[None, :], other=0.0)  # fmt: skip
    result = tl.sum(weights[:, None] * values.to(tl.float32), 0)
    if HAS_EXTRA:
        weight = tl.exp(extra - base)
        total += weight
        # An empty partial is not read, which saves bandwidth of the bus.
        inside = d < tl.where(extra == float("-inf"), 0, DIM)
        result += weight * tl.load(extra_out + item * DIM + d, mask=inside, other=0.0).to(tl.float32)
    if HAS_SINKS:  # An attention sink is a key without a value.
        total += tl.exp(sink - base)
    some = total > 0
    result = tl.where(some, result / tl.where(some, total, 1.0), 0.0)
    tl.store(merged + item * DIM + d, result.to(merged.dtype.element_ty), mask=live)
    tl.store(merged_lse + item, tl.where(some, base + tl.log(tl.where(some, total, 1.0)), float("-inf")))


def merge_partials(
    out: Tensor, lse: Tensor, extra_partial: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32, sinks: Tensor | None = None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, heads, num_parts, dim = out.shape
    merged = out.new_empty(rows, heads, dim, dtype=dtype) if into is None else into, lse.new_empty(rows, heads)
    if rows:
        _merge_kernel[(rows * heads,)](
            out, lse, *(extra_partial or (None, None)), sinks, *merged, heads, num_parts,
            dim, triton.next_power_of_2(dim), triton.next_power_of_2(num_parts), extra_partial is not None,
            sinks is not None,
        )  # fmt: skip
    return merged
