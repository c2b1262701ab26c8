"""Selection of pages: top-k with forced pages, split by residency into compact lists of frames and missing pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.operations import Reuse, Selection
from hybrid_backend.kernels.triton.common import kernel, reuse_pointers, reuses
from hybrid_backend.kernels.triton.counters import MISSING_PAGES, MISSING_TOKENS, RESIDENT_PAGES, RESIDENT_TOKENS

_MAX_TILE = 2048  # columns that a program holds at once
_WARPS = 16  # of a program with a whole tile
_DIGITS = tl.constexpr(256)
_HIGHEST = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _keys_of(scores, first, pages, sinks, recent, TILE: tl.constexpr):
    """Return the columns of a tile, their keys, and the mask of columns that are neither forced nor beyond the row.

    A key is the score as an unsigned number of 32 bits of the same order; NaN is the lowest, and the zeros are equal.
    """
    column = first + tl.arange(0, TILE)
    score = tl.load(scores + column, mask=column < pages, other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    return column, key, (column >= sinks) & (column < pages - recent)


@triton.jit
def _counted(key, is_free, low, SHIFT: tl.constexpr):
    """Return the histogram of a digit, of the free keys whose higher digits are those of ``low``."""
    has_prefix = is_free
    if SHIFT < 24:
        has_prefix = is_free & (((key ^ low) >> (SHIFT + 8)) == 0)
    return tl.histogram(((key >> SHIFT) & 255).to(tl.int32), _DIGITS, mask=has_prefix)


@triton.jit
def _threshold(scores, pages, selectable, sinks, recent, TILE: tl.constexpr, ONE_TILE: tl.constexpr):
    """Return the key with rank ``selectable`` among the columns that are not forced, and the number of larger keys.

    Radix selection: each digit comes from a histogram of the keys with the same higher digits, and reads the scores
    once.
    """
    low, better = tl.zeros([], tl.uint32) + _HIGHEST, tl.zeros([], tl.int32)
    if selectable > 0:
        low -= _HIGHEST
        digit = tl.arange(0, _DIGITS)
        if ONE_TILE:
            _, tile_keys, tile_is_free = _keys_of(scores, 0, pages, sinks, recent, TILE)
        for shift in tl.static_range(24, -1, -8):
            if ONE_TILE:
                count = _counted(tile_keys, tile_is_free, low, shift)
            else:
                count = tl.zeros([_DIGITS], tl.int32)
                for first in range(0, pages, TILE):
                    _, key, is_free = _keys_of(scores, first, pages, sinks, recent, TILE)
                    count += _counted(key, is_free, low, shift)
            at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
            chosen = tl.max(tl.where(better + at_least >= selectable, digit, 0), 0)
            better += tl.sum(tl.where(digit > chosen, count, 0), 0)
            low += chosen.to(tl.uint32) << shift
    return low, better


@kernel()
def _select_kernel(scores, num_pages, seq_lens, budgets, requests, frame_of, table, chosen, count, frames, frame_count,
                   tokens, missing, absent, missing_count, mailbox_count, epochs, list_epochs, counters, sinks,
                   recent, columns, k, table_stride, frame_columns,
                   LISTS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, ONE_TILE: tl.constexpr):  # fmt: skip
    row, listing = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = row * LISTS + listing
    scores += line * columns
    pages = tl.load(num_pages + row)
    budget = tl.minimum(tl.minimum(tl.load(budgets + row), pages), k)
    request = tl.load(requests + row).to(tl.int64)
    forced = tl.minimum(sinks, pages) + tl.minimum(recent, tl.maximum(pages - sinks, 0))
    to_score, to_read = pages, pages  # columns with scores; columns, or entries of a list that is reused
    if epochs is not None:
        # A list reads its own epoch, because another list of the row may have stored its epoch already.
        is_reused = reuses(epochs, list_epochs + listing, row, LISTS, pages)
        to_score, to_read = tl.where(is_reused, 0, pages), tl.where(is_reused, tl.load(count + line), pages)
    low, better = _threshold(scores, to_score, tl.minimum(budget - forced, to_score), sinks, recent, TILE, ONE_TILE)
    # The first ones of the equal keys are selected; of forced pages alone, as many as the budget has.
    is_forced_only = budget <= forced
    ties = tl.where(is_forced_only, budget, budget - forced - better)

    taken = tl.zeros([], tl.int32)
    resident = tl.zeros([], tl.int32)
    lacking = tl.zeros([], tl.int32)
    equals = tl.zeros([], tl.int32)
    for first in range(0, to_read, TILE):
        column, key, is_free = _keys_of(scores, first, to_score, sinks, recent, TILE)
        is_forced = (column < to_score) & (is_free == 0)
        equal = tl.where(is_forced_only, is_forced, is_free & (key == low)).to(tl.int32)
        rank = equals + tl.cumsum(equal, 0)
        is_better = (is_forced | (is_free & (key > low))) & (is_forced_only == 0)
        pick = is_better | ((equal > 0) & (rank <= ties))
        equals += tl.sum(equal, 0)
        if epochs is not None:
            entry = first + tl.arange(0, TILE)
            again = is_reused & (entry < to_read)
            column = tl.where(is_reused, tl.load(chosen + line * k + entry, mask=again, other=0), column)
            pick = tl.where(is_reused, again, pick)
        page = tl.load(table + row * table_stride + column, mask=pick, other=-1)
        frame = page  # without a map the device reads the host pool
        if frame_of is not None:
            frame = tl.load(frame_of + request * frame_columns + column, mask=pick & (column < frame_columns), other=-1)
        is_resident, is_missing = (pick & (frame >= 0)).to(tl.int32), (pick & (frame < 0)).to(tl.int32)
        picked = pick.to(tl.int32)
        nth, nth_resident = tl.cumsum(picked, 0), tl.cumsum(is_resident, 0)
        tl.store(chosen + line * k + taken + nth - 1, column, mask=pick)
        tl.store(frames + line * k + resident + nth_resident - 1, frame, mask=is_resident > 0)
        to = line * k + lacking + nth - nth_resident - 1
        tl.store(missing + to, page, mask=is_missing > 0)
        tl.store(absent + to, column, mask=is_missing > 0)
        taken += tl.sum(picked, 0)
        resident += tl.sum(is_resident, 0)
        lacking += tl.sum(is_missing, 0)
    tl.store(count + line, taken)
    tl.store(frame_count + line, resident)
    tl.store(missing_count + line, lacking)
    if epochs is not None:
        tl.store(list_epochs + line, tl.load(epochs + row))
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
    counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None, reuse: Reuse | None = None,
) -> Selection:  # fmt: skip
    rows, lists, columns = scores.shape
    number, listed = num_pages.new_empty(4, rows, lists), num_pages.new_empty(4, rows, lists, max_pages)
    missing, mailbox_count = (listed[2], None) if mailbox is None else (mailbox[0][:rows], mailbox[1])
    tile = min(_MAX_TILE, triton.next_power_of_2(max(columns, 16)))
    pages = (listed[0], number[0]) if reuse is None else (reuse.pages[:rows], reuse.pages_listed[:rows])
    out = Selection(*pages, listed[1], number[1], number[2], missing, listed[3], number[3])
    if rows:
        _select_kernel[(rows, lists)](
            scores, num_pages, seq_lens, budgets, requests, frame_of, table, out.pages, out.pages_listed, out.frames,
            out.frames_listed, out.tokens, out.missing, out.absent, out.missing_listed, mailbox_count,
            *reuse_pointers(reuse), counters, sinks, max(recent, 1), columns, max_pages, table.stride(0),
            0 if frame_of is None else frame_of.shape[1], lists, page_size, tile, columns <= _MAX_TILE,
            num_warps=_WARPS if tile == _MAX_TILE else 4,
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
