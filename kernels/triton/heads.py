"""Kernels that plan copies of pages of single KV heads: loads of selections, and passage through staging buffers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.operations import Selection, StreamPlan
from hybrid_backend.kernels.triton.common import kernel

_BLOCK = 1024  # pages that a program plans at once
_LISTS = 256  # page lists that a program counts at once; a constant, so that no batch size needs a kernel of its own


@kernel()
def _load_kernel(pages, host, to_select, entries, frames, cached, host_pages, frame_ids, first, loaded, k,
                 BLOCK: tl.constexpr):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    loads, inside = tl.load(to_select + row) > 0, i < loaded
    chosen = row * k + first + i
    frame = tl.load(frames + row * loaded + i, mask=inside & loads, other=-1)
    tl.store(frame_ids + row * loaded + i, frame, mask=inside)
    if loads:
        entry = tl.load(entries + row).to(tl.int64)
        tl.store(host_pages + row * loaded + i, tl.load(host + chosen, mask=inside), mask=inside)
        tl.store(cached + entry * loaded + i, tl.load(pages + chosen, mask=inside), mask=inside)


def plan_load(
    chosen: Selection, to_select: Tensor, entries: Tensor, frames: Tensor, first: int, cached: Tensor
) -> tuple[Tensor, Tensor]:
    lists, loaded = frames.shape
    host_pages, frame_ids = frames.new_empty(2, lists, loaded)
    if lists:
        _load_kernel[(lists,)](
            chosen.pages, chosen.frames, to_select, entries, frames, cached, host_pages, frame_ids, first, loaded,
            chosen.pages.shape[2], triton.next_power_of_2(loaded),
        )  # fmt: skip
    return host_pages, frame_ids


@kernel()
def _stream_plan_kernel(table, num_pages, seq_lens, ranks, pages, places, begins, ends, rest_begins, rest_ends,
                        resident, framed, rows, group, groups, pieces, capacity, first, last, table_stride,
                        KV_HEADS: tl.constexpr, PAGE: tl.constexpr, FRAMED: tl.constexpr, BLOCK: tl.constexpr,
                        BLOCK_L: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, lists = row * KV_HEADS + head, rows * KV_HEADS
    rank, tokens = tl.load(ranks + head), tl.load(seq_lens + row)
    middle = tl.maximum(tl.load(num_pages + row) - first - last, 0)
    count, own_group = tl.where(rank >= 0, middle, 0), tl.where(rank >= 0, rank // group, -1)
    # The list follows all lists of its group that belong to earlier rows, or to earlier heads of its row.
    before, total = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for nth in range(0, lists, BLOCK_L):
        i = nth + tl.arange(0, BLOCK_L)
        rank_of_line = tl.load(ranks + i % KV_HEADS)
        pages_of_lines = tl.load(num_pages + i // KV_HEADS, mask=i < lists, other=0) - first - last
        in_group = (i < lists) & (rank_of_line >= 0) & (rank_of_line // group == own_group)
        pages_of_lines = tl.where(in_group, tl.maximum(pages_of_lines, 0), 0)
        before += tl.sum(tl.where(i < line, pages_of_lines, 0), 0)
        total += tl.sum(pages_of_lines, 0)
    room, n = pieces * capacity, tl.arange(0, BLOCK)
    staged = tl.minimum(tl.maximum(room - before, 0), count)
    begin_of_group = tl.maximum(own_group, 0).to(tl.int64) * room
    for nth in range(0, staged, BLOCK):
        inside, number = nth + n < staged, before + nth + n
        page = tl.load(table + row * table_stride + first + nth + n, mask=inside, other=0)
        tl.store(pages + begin_of_group + number, page * KV_HEADS + head, mask=inside)
        tl.store(places + begin_of_group + number, number % capacity, mask=inside)
    if rank >= 0:
        # All lists of the group share the places that stay empty.
        i = tl.arange(0, BLOCK_H)
        rank_of_head = tl.load(ranks + i, mask=i < KV_HEADS, other=-1)
        heads = tl.sum(tl.where((rank_of_head >= 0) & (rank_of_head // group == own_group), 1, 0), 0)
        share = row * heads + rank % group
        for empty in range(total + share * BLOCK, room, rows * heads * BLOCK):
            tl.store(places + begin_of_group + empty + n, -1, mask=empty + n < room)
    for piece in range(groups * pieces):
        start = piece % pieces * capacity
        is_own = piece // pieces == own_group
        begin = tl.minimum(tl.maximum(before - start, 0), capacity)
        end = tl.minimum(tl.maximum(before + count - start, 0), capacity)
        tl.store(begins + piece * lists + line, tl.where(is_own, begin, 0) * PAGE)
        tl.store(ends + piece * lists + line, tl.where(is_own, end, 0) * PAGE)
    tl.store(rest_begins + line, tl.where(rank >= 0, first + staged, 0) * PAGE)
    beyond = (first + count) * PAGE if FRAMED else tokens
    tl.store(rest_ends + line, tl.where(rank >= 0, beyond, 0))
    tl.store(resident + line, tl.where(rank == -1, tokens, 0))
    tl.store(framed + line, tl.where(rank != -1, tokens - middle * PAGE, 0) if FRAMED else 0)


def plan_stream(
    table: Tensor, num_pages: Tensor, seq_lens: Tensor, ranks: Tensor, groups: int, group: int, pieces: int,
    capacity: int, page_size: int, first: int = 0, last: int = 1, is_framed: bool = False,
) -> StreamPlan:  # fmt: skip
    rows, kv_heads = len(table), len(ranks)
    pages, places = num_pages.new_empty(2, groups * pieces, capacity)
    bounds, tokens = num_pages.new_empty(2, groups * pieces, rows, kv_heads), num_pages.new_empty(4, rows, kv_heads)
    plan = StreamPlan(pages, places, *bounds, *tokens)
    if rows:
        _stream_plan_kernel[(rows, kv_heads)](
            table, num_pages, seq_lens, ranks, *plan, rows, group, groups, pieces, capacity, first, last,
            table.stride(0), kv_heads, page_size, is_framed, _BLOCK, _LISTS, triton.next_power_of_2(kv_heads),
        )  # fmt: skip
    return plan
