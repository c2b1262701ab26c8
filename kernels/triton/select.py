"""Selection of pages: top-k with forced pages, split by residency into compact lists of frames and missing pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.operations import Selection
from hybrid_backend.kernels.triton.common import kernel, ordered
from hybrid_backend.kernels.triton.counters import MISSING_PAGES, MISSING_TOKENS, RESIDENT_PAGES, RESIDENT_TOKENS

_MAX_TILE = 2048  # columns that a program holds at once
_FORCED = tl.constexpr(1 << 32)  # key of a page that is always selected
_BEYOND = tl.constexpr(-1)  # key of a column beyond the row
_DIGITS = tl.constexpr(256)


@triton.jit
def _keys_of(scores, first, pages, sinks, recent, TILE: tl.constexpr):
    """Return the columns of a tile and their keys.

    A key is the score as a 32-bit number of the same order. Keys of forced pages are larger, those beyond the row
    smaller.
    """
    column = first + tl.arange(0, TILE)
    key = ordered(tl.load(scores + column, mask=column < pages, other=float("-inf"))) + 2147483648
    key = tl.where((column < sinks) | (column >= pages - recent), _FORCED, key)
    return column, tl.where(column < pages, key, _BEYOND)


@triton.jit
def _threshold(scores, pages, budget, sinks, recent, TILE: tl.constexpr, ONE_TILE: tl.constexpr):
    """Return the budget-th largest key and the number of larger keys.

    Radix selection: each digit comes from a histogram of the keys with the same higher digits, and reads the scores
    once.
    """
    forced = tl.minimum(sinks, pages) + tl.minimum(recent, tl.maximum(pages - sinks, 0))
    low, better = tl.zeros([], tl.int64) + _FORCED, tl.zeros([], tl.int32)
    if forced < budget:
        low -= _FORCED
        better += forced
        digit = tl.arange(0, _DIGITS)
        if ONE_TILE:
            _, tile_keys = _keys_of(scores, 0, pages, sinks, recent, TILE)
        for shift in tl.static_range(24, -1, -8):
            count = tl.zeros([_DIGITS], tl.int32)
            if ONE_TILE:
                has_prefix = ((tile_keys ^ low) >> (shift + 8)) == 0
                count += tl.histogram(((tile_keys >> shift) & 255).to(tl.int32), _DIGITS, mask=has_prefix)
            else:
                for first in range(0, pages, TILE):
                    _, key = _keys_of(scores, first, pages, sinks, recent, TILE)
                    has_prefix = ((key ^ low) >> (shift + 8)) == 0
                    count += tl.histogram(((key >> shift) & 255).to(tl.int32), _DIGITS, mask=has_prefix)
            at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
            chosen = tl.max(tl.where(better + at_least >= budget, digit, 0), 0)
            better += tl.sum(tl.where(digit > chosen, count, 0), 0)
            low += chosen.to(tl.int64) << shift
    return low, better


@kernel()
def _select_kernel(scores, num_pages, seq_lens, budgets, requests, frame_of, table, chosen, count, frames, frame_count,
                   tokens, missing, absent, missing_count, mailbox_count, counters, sinks, recent, columns, k,
                   table_stride, frame_columns,
                   LISTS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, ONE_TILE: tl.constexpr):  # fmt: skip
    row, listing = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = row * LISTS + listing
    scores += line * columns
    pages = tl.load(num_pages + row)
    budget = tl.minimum(tl.minimum(tl.load(budgets + row), pages), k)
    request = tl.load(requests + row).to(tl.int64)
    low, better = _threshold(scores, pages, budget, sinks, recent, TILE, ONE_TILE)
    ties = budget - better  # the first ones of the equal keys are selected

    taken = tl.zeros([], tl.int32)
    resident = tl.zeros([], tl.int32)
    lacking = tl.zeros([], tl.int32)
    equals = tl.zeros([], tl.int32)
    for first in range(0, pages, TILE):
        column, key = _keys_of(scores, first, pages, sinks, recent, TILE)
        equal = ((key == low) & (column < pages)).to(tl.int32)
        rank = equals + tl.cumsum(equal, 0)
        pick = (column < pages) & ((key > low) | ((equal > 0) & (rank <= ties)))
        equals += tl.sum(equal, 0)
        page = tl.load(table + row * table_stride + column, mask=pick, other=-1)
        frame = page  # without a map the device reads the host pool
        if frame_of is not None:
            frame = tl.load(frame_of + request * frame_columns + column, mask=pick & (column < frame_columns), other=-1)
        is_resident, is_missing = (pick & (frame >= 0)).to(tl.int32), (pick & (frame < 0)).to(tl.int32)
        picked = pick.to(tl.int32)
        tl.store(chosen + line * k + taken + tl.cumsum(picked, 0) - 1, column, mask=pick)
        tl.store(frames + line * k + resident + tl.cumsum(is_resident, 0) - 1, frame, mask=is_resident > 0)
        to = line * k + lacking + tl.cumsum(is_missing, 0) - 1
        tl.store(missing + to, page, mask=is_missing > 0)
        tl.store(absent + to, column, mask=is_missing > 0)
        taken += tl.sum(picked, 0)
        resident += tl.sum(is_resident, 0)
        lacking += tl.sum(is_missing, 0)
    tl.store(count + line, taken)
    tl.store(frame_count + line, resident)
    tl.store(missing_count + line, lacking)
    if mailbox_count is not None:
        tl.store(mailbox_count + line, lacking)
    tail = pages * PAGE - tl.load(seq_lens + row)  # tokens that the growing page has no content for
    listed_tokens = tl.where(resident > 0, resident * PAGE - tail, 0)
    tl.store(tokens + line, listed_tokens)
    if counters is not None:
        tl.atomic_add(counters + RESIDENT_PAGES, resident.to(tl.int64), sem="relaxed")
        tl.atomic_add(counters + MISSING_PAGES, lacking.to(tl.int64), sem="relaxed")
        tl.atomic_add(counters + RESIDENT_TOKENS, listed_tokens.to(tl.int64), sem="relaxed")
        tl.atomic_add(counters + MISSING_TOKENS, lacking.to(tl.int64) * PAGE, sem="relaxed")


def select_pages(
    scores: Tensor, num_pages: Tensor, seq_lens: Tensor, budgets: Tensor, requests: Tensor,
    frame_of: Tensor | None, table: Tensor, page_size: int, sinks: int, recent: int, max_pages: int,
    counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None,
) -> Selection:  # fmt: skip
    rows, lists, columns = scores.shape
    number, listed = num_pages.new_empty(4, rows, lists), num_pages.new_empty(4, rows, lists, max_pages)
    missing, mailbox_count = (listed[2], None) if mailbox is None else (mailbox[0][:rows], mailbox[1])
    out = Selection(listed[0], number[0], listed[1], number[1], number[2], missing, listed[3], number[3])
    if rows:
        _select_kernel[(rows, lists)](
            scores, num_pages, seq_lens, budgets, requests, frame_of, table, out.pages, out.pages_listed, out.frames,
            out.frames_listed, out.tokens, out.missing, out.absent, out.missing_listed, mailbox_count, counters, sinks,
            max(recent, 1), columns, max_pages, table.stride(0), 0 if frame_of is None else frame_of.shape[1],
            lists, page_size, min(_MAX_TILE, triton.next_power_of_2(max(columns, 16))), columns <= _MAX_TILE,
        )  # fmt: skip
    return out


@kernel()
def _union_kernel(absent, absent_count, scores, marked, union, union_count, best, columns, k, most,
                  LISTS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    for first in range(0, columns, TILE):
        tl.store(marked + row * columns + first + i, 0, mask=first + i < columns)
    tl.debug_barrier()
    for listing in range(LISTS):
        count = tl.load(absent_count + row * LISTS + listing)
        for first in range(0, count, TILE):
            page = tl.load(absent + (row * LISTS + listing) * k + first + i, mask=first + i < count, other=0)
            tl.store(marked + row * columns + page, 1, mask=first + i < count)
    tl.debug_barrier()
    listed = tl.zeros([], tl.int32)
    for first in range(0, columns, TILE):
        column = first + i
        mark = tl.load(marked + row * columns + column, mask=column < columns, other=0)
        tl.store(union + row * most + listed + tl.cumsum(mark, 0) - 1, column, mask=mark > 0)
        listed += tl.sum(mark, 0)
        top = tl.full([TILE], float("-inf"), tl.float32)
        for listing in range(LISTS):
            offsets = (row * LISTS + listing) * columns + column
            top = tl.maximum(top, tl.load(scores + offsets, mask=column < columns, other=float("-inf")))
        tl.store(best + row * columns + column, top, mask=column < columns)
    tl.store(union_count + row, listed)


def union_pages(absent: Tensor, listed: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, lists, k = absent.shape
    columns = scores.shape[2]
    most = min(lists * k, columns)
    union, count = absent.new_full((rows, 1, most), -1), listed.new_zeros(rows, 1)
    best, marked = scores.new_empty(rows, 1, columns), absent.new_empty(rows, columns)
    if rows:
        tile = min(_MAX_TILE, triton.next_power_of_2(max(columns, 16)))
        _union_kernel[(rows,)](absent, listed, scores, marked, union, count, best, columns, k, most, lists, tile)
    return union, count, best
