"""Scores of pages by their digests: a GEMM of queries and digests, then the combination over query heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.digest_format import CODES, digest_format_of
from hybrid_backend.kernels.operations import AGGREGATES, Reuse, check_one_query
from hybrid_backend.kernels.triton import codes
from hybrid_backend.kernels.triton.common import (
    byte_tail,
    dot,
    group_block,
    kernel,
    precision_of,
    reuse_pointers,
    reuses,
)

_TILE = 64  # pages that a program scores
_HEADS = 16  # query heads that a program combines at once
_HELD = 4096  # numbers of their softmax that it holds at once


@kernel("q", "digests")
def _score_kernel(q, digests, table, num_pages, budgets, epochs, list_epochs, logits, tops, sums, bound, scale, lists,
                  columns, stride, tiles,
                  KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr,
                  TILE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    row, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    pages = tl.load(num_pages + row)
    heads = KV_HEADS * GROUP
    g, d, column = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tile * TILE + tl.arange(0, TILE)
    query_head = row * heads + head * GROUP + g
    is_scored = (tile * TILE < pages) & (tl.load(budgets + row) < pages)
    if is_scored & (reuses(epochs, list_epochs, row, lists, pages) == 0):
        listed = column < pages
        page = tl.load(table + row * stride + column, mask=listed, other=0).to(tl.int64)
        item = page * KV_HEADS + head
        offsets = item[:, None] * (2 * DIM + TAIL) + d[None, :]
        inside = listed[:, None] & (d < DIM)[None, :]
        high = tl.load(digests + offsets, mask=inside, other=0.0)
        low = tl.load(digests + offsets + DIM, mask=inside, other=0.0)
        live = (g < GROUP)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + query_head[:, None] * DIM + d[None, :], mask=live, other=0.0)
        kind = query.dtype
        query = query.to(tl.float32)
        half = bound * tl.abs(query)
        to_max, to_min = ((query + half) * 0.5).to(kind), ((query - half) * 0.5).to(kind)
        if TAIL:  # byte digests: the query's type represents every byte exactly
            high, low = (high.to(tl.float32) - 128).to(kind), (low.to(tl.float32) - 128).to(kind)
            scales = (digests + item * (2 * DIM + TAIL) + 2 * DIM).to(tl.pointer_type(tl.float32))
            estimates = dot(to_max, tl.trans(high), PRECISION) * tl.load(scales, mask=listed, other=0.0)[None, :]
            estimates += dot(to_min, tl.trans(low), PRECISION) * tl.load(scales + 1, mask=listed, other=0.0)[None, :]
        else:
            estimates = dot(to_max, tl.trans(high), PRECISION)
            estimates += dot(to_min, tl.trans(low), PRECISION)
        tl.store(logits + query_head[:, None] * columns + column[None, :], estimates,
                 mask=(g < GROUP)[:, None] & listed[None, :])  # fmt: skip
        # The growing page is always selected, so it takes no share of the other pages' softmax.
        shared = tl.where((column < pages - 1)[None, :], estimates * scale, float("-inf"))
        top = tl.max(shared, 1)
        tl.store(tops + query_head * tiles + tile, top, mask=g < GROUP)
        base = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sums + query_head * tiles + tile, tl.sum(tl.exp(shared - base[:, None]), 1), mask=g < GROUP)


@kernel()
def _combine_kernel(logits, tops, sums, num_pages, budgets, epochs, list_epochs, scores, scale, columns, tiles,
                    LISTS: tl.constexpr, HEADS: tl.constexpr, HOW: tl.constexpr, CHUNK: tl.constexpr,
                    TILE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    row, listing, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    pages = tl.load(num_pages + row)
    column, t, h = tile * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_H)
    listed = column < pages
    total = tl.zeros([TILE], tl.float32)
    list_heads: tl.constexpr = HEADS // LISTS
    is_reused = reuses(epochs, list_epochs, row, LISTS, pages)
    if (tile * TILE < pages) & (tl.load(budgets + row) < pages) & (is_reused == 0):
        # The heads of a chunk are read at once, because a program waits longer for memory than it computes.
        for first in range(0, list_heads, CHUNK):
            is_head = (h < CHUNK) & (first + h < list_heads)
            heads = row * HEADS + listing * list_heads + first + h
            inside = is_head[:, None] & listed[None, :]
            estimates = tl.load(logits + heads[:, None] * columns + column[None, :], mask=inside, other=0.0)
            if HOW == 2:
                scored = is_head[:, None] & (t * TILE < pages)[None, :]
                of_tiles = heads[:, None] * tiles + t[None, :]
                top = tl.load(tops + of_tiles, mask=scored, other=float("-inf"))
                share = tl.load(sums + of_tiles, mask=scored, other=0.0)
                highest = tl.max(top, 1)
                base = tl.where(highest == float("-inf"), 0.0, highest)
                weight = tl.sum(tl.where(top == float("-inf"), 0.0, share * tl.exp(top - base[:, None])), 1)
                weight = tl.where(weight > 0, weight, 1.0)
                shares = tl.exp(estimates * scale - base[:, None]) / weight[:, None]
                total += tl.sum(tl.where(inside & (column < pages - 1)[None, :], shares, 0.0), 0)
            elif HOW == 1:  # A chunk is the group of a KV head, whose maxima are summed over KV heads.
                total += tl.max(tl.where(is_head[:, None], estimates, float("-inf")), 0)
            else:
                total += tl.sum(estimates, 0)
    tl.store(scores + (row * LISTS + listing) * columns + column, tl.where(listed, total, float("-inf")),
             mask=(column < columns) & (is_reused == 0))  # fmt: skip


def page_scores(
    q: Tensor, digests: Tensor, table: Tensor, num_pages: Tensor, budgets: Tensor, aggregate: str,
    per_head: bool, bound: float, scale: float, page_size: int = 0, query_start: Tensor | None = None,
    reuse: Reuse | None = None,
) -> Tensor:  # fmt: skip
    if query_start is not None:
        check_one_query(query_start, len(table))
    rows, heads, dim = q.shape
    kv_heads = digests.shape[1]
    columns = table.shape[1]
    tiles = triton.cdiv(columns, _TILE)
    lists = kv_heads if per_head else 1
    scores = q.new_empty(rows, lists, columns, dtype=torch.float32) if reuse is None else reuse.scores[:rows]
    if not scores.numel():
        return scores
    logits = q.new_empty(rows, heads, columns, dtype=torch.float32)
    tops, sums = q.new_empty(2, rows, heads, tiles, dtype=torch.float32)
    group, epochs = heads // kv_heads, reuse_pointers(reuse)
    if digest_format_of(digests, dim) is CODES:
        codes.estimate(
            q, digests, table, num_pages, budgets, epochs, lists, logits, tops, sums, scale, page_size, _TILE
        )
    else:
        _score_kernel[(rows, kv_heads, tiles)](
            q, digests, table, num_pages, budgets, *epochs, logits, tops, sums, bound, scale, lists, columns,
            table.stride(0), tiles,
            kv_heads, group, dim, byte_tail(digests, dim), _TILE, group_block(group),
            triton.next_power_of_2(dim), precision_of(q.dtype),
        )  # fmt: skip
    block_t, kind = triton.next_power_of_2(tiles), AGGREGATES.index(aggregate)
    chunk = max(1, min(_HEADS, triton.next_power_of_2(heads // lists), _HELD // block_t))
    chunk = group if aggregate == "max" else chunk
    _combine_kernel[(rows, lists, tiles)](
        logits, tops, sums, num_pages, budgets, *epochs, scores, scale, columns, tiles,
        lists, heads, kind, chunk, _TILE, triton.next_power_of_2(chunk), block_t,
    )  # fmt: skip
    return scores
