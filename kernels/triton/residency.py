"""The residency map on the device: which page each slot holds, kept up by the stream itself.

``slot_of[..., region, column]``: slot that holds a region's logical page, -1: not resident; ``page_of[..., slot]``: its
inverse; ``importance[..., slot]``: fp32, of the slot's page at its last selection (+inf: always selected, -inf: empty).
Slots are global: region r owns ``r * size .. (r + 1) * size``. The maps of all layers are stacked: ``[layers, ...]``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.triton.maps import Copies, Maps
from hybrid_backend.kernels.triton.tally import RECALLED_PAGES


@triton.jit
def ordered(x):
    """fp32 -> int64 in the same order; NaN counts as the lowest."""
    bits = tl.where(x == x, x, float("-inf")).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit(do_not_specialize=["columns", "size", "all_slots"])
def _open_kernel(slot_of, page_of, importance, regions, pages, positions, columns, size, all_slots, all_columns,
                 PAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    layer, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if (tl.load(pages + row) >= 0) & (position % PAGE == 0):
        region, page = tl.load(regions + row).to(tl.int64), position // PAGE
        entry = slot_of + layer * all_columns + region * columns + page
        if tl.load(entry) < 0:  # else a step that failed half-way opened it
            s = tl.arange(0, BLOCK)
            first = layer * all_slots + region * size
            score = tl.load(importance + first + s, mask=s < size, other=float("inf"))
            victim = tl.argmin(score, 0)
            old = tl.load(page_of + first + victim)
            if old >= 0:
                tl.store(slot_of + layer * all_columns + region * columns + old, -1)
            tl.store(page_of + first + victim, page)
            # The youngest page outranks older ones where importance is age; a selection overwrites it elsewhere.
            tl.store(importance + first + victim, page.to(tl.float32))
            tl.store(entry, (region * size + victim).to(tl.int32))


@triton.jit(do_not_specialize=["sinks", "recent", "columns", "size"])
def _note_kernel(page_of, importance, scores, num_pages, budgets, regions, sinks, recent, columns, size,
                 LISTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pages = tl.load(num_pages + row)
    if tl.load(budgets + row) < pages:
        first = tl.load(regions + row).to(tl.int64) * size
        s = tl.arange(0, BLOCK)
        page = tl.load(page_of + first + s, mask=s < size, other=-1)
        held = page >= 0
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for listing in range(LISTS):
            score = tl.load(scores + (row * LISTS + listing) * columns + page, mask=held & (page < pages), other=0.0)
            best = tl.maximum(best, score)
        best = tl.where((page < sinks) | (page >= pages - recent), float("inf"), best)
        tl.store(importance + first + s, tl.where(held, best, float("-inf")), mask=s < size)


@triton.jit(do_not_specialize=["selected_k", "absent_k", "columns", "size", "table_stride"])
def _plan_kernel(slot_of, page_of, importance, scores, table, selected, selected_count, absent, absent_count,
                 num_pages, regions, generations, due, keep, to_slots, to_host, to_pages, to_importance, to_regions,
                 to_started, tally, selected_k, absent_k, most, columns, size, table_stride,
                 LISTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tl.store(to_slots + row * most + i, -1, mask=i < most)
    count = tl.load(absent_count + row)
    if (tl.load(due) > 0) & (tl.load(num_pages + row) > 0) & (count > 0):
        region = tl.load(regions + row).to(tl.int64)
        first = region * size
        # Which of the region's slots hold pages that any list selected.
        tl.store(keep + row * size + i, 0, mask=i < size)
        tl.debug_barrier()
        for listing in range(LISTS):
            mine = i < tl.load(selected_count + row * LISTS + listing)
            slot = tl.load(selected + (row * LISTS + listing) * selected_k + i, mask=mine, other=0)
            tl.store(keep + row * size + slot - first, 1, mask=mine)
        tl.debug_barrier()
        is_kept = tl.load(keep + row * size + i, mask=i < size, other=1) > 0
        # Least important slots first, most important absent pages first: pairs of them are copies.
        lowest: tl.constexpr = -(1 << 62)
        score = tl.load(importance + first + i, mask=i < size, other=0.0)
        key = tl.where(is_kept | (score == float("inf")), -lowest, ordered(score) * 4294967296 + i)
        victims = tl.sort(key)
        page = tl.load(absent + row * absent_k + i, mask=i < count, other=0)
        score = tl.load(scores + row * columns + page, mask=i < count, other=0.0)
        wanted = tl.sort(tl.where(i < count, ordered(score) * 4294967296 + i, lowest), descending=True)
        paired = (victims < -lowest) & (wanted > lowest) & (i < most)
        victim = victims & 0xFFFFFFFF
        page = tl.load(absent + row * absent_k + (wanted & 0xFFFFFFFF), mask=paired, other=0)
        old = tl.load(page_of + first + victim, mask=paired, other=-1)
        tl.store(slot_of + region * columns + old, -1, mask=paired & (old >= 0))
        tl.store(page_of + first + victim, -1, mask=paired)
        tl.store(importance + first + victim, float("-inf"), mask=paired)
        at = row * most + i
        tl.store(to_slots + at, (first + victim).to(tl.int32), mask=paired)
        tl.store(to_host + at, tl.load(table + row * table_stride + page, mask=paired, other=0), mask=paired)
        tl.store(to_pages + at, page, mask=paired)
        tl.store(to_importance + at, tl.load(scores + row * columns + page, mask=paired, other=0.0), mask=paired)
        tl.store(to_regions + row, region.to(tl.int32))
        tl.store(to_started + row, tl.load(generations + row).to(tl.int64))
        if tally is not None:
            tl.atomic_add(tally + RECALLED_PAGES, tl.sum(paired.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["columns", "all_slots", "most"])
def _commit_kernel(slot_of, page_of, importance, to_slots, to_pages, to_importance, to_regions, to_started,
                   generations, rows, columns, all_slots, all_columns, most, BLOCK: tl.constexpr):  # fmt: skip
    layer, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    line = layer * rows + row
    slot = tl.load(to_slots + line * most + i, mask=i < most, other=-1)
    region = tl.load(to_regions + line).to(tl.int64)
    is_current = tl.load(to_started + line) == tl.load(generations + region)
    live = tl.where(is_current, slot, -1) >= 0
    page = tl.load(to_pages + line * most + i, mask=live, other=0)
    tl.store(page_of + layer * all_slots + slot, page, mask=live)
    tl.store(importance + layer * all_slots + slot, tl.load(to_importance + line * most + i, mask=live, other=0.0),
             mask=live)  # fmt: skip
    tl.store(slot_of + layer * all_columns + region * columns + page, slot, mask=live)
    tl.store(to_slots + line * most + i, -1, mask=i < most)  # once


def open_pages(maps: Maps, regions: Tensor, pages: Tensor, positions: Tensor, page_size: int) -> None:
    """Give every page that this step begins a slot in all layers, evicting the least important page.

    Args:
        maps: of all layers.
        regions: ``[rows]`` int32; pages: ``[rows]`` int32 host page of the row's new token, -1: a row of padding;
            positions: ``[rows]`` int32 of the new token in its sequence.
    """
    layers, count, columns = maps.slot_of.shape
    slots = maps.page_of.shape[1]
    size = slots // count
    _open_kernel[(layers, len(regions))](
        *maps, regions, pages, positions, columns, size, slots, count * columns, page_size, triton.next_power_of_2(size)
    )


def note_scores(
    maps: Maps, scores: Tensor, num_pages: Tensor, budgets: Tensor, regions: Tensor, sinks: int, recent: int
) -> None:
    """Refresh the importance of resident pages in one layer, for rows that attend fewer pages than they have.

    ``scores``: ``[rows, lists, columns]``; the others: ``[rows]`` int32.
    """
    rows, lists, columns = scores.shape
    size = len(maps.page_of) // len(maps.slot_of)
    _note_kernel[(rows,)](
        maps.page_of, maps.importance, scores, num_pages, budgets, regions, sinks, max(recent, 1), columns, size, lists,
        triton.next_power_of_2(size),
    )  # fmt: skip


def plan_recall(
    maps: Maps, copies: Copies, scores: Tensor, table: Tensor, selected: tuple[Tensor, Tensor],
    absent: tuple[Tensor, Tensor], num_pages: Tensor, regions: Tensor, generations: Tensor, due: Tensor, keep: Tensor,
    tally: Tensor | None = None,
) -> None:  # fmt: skip
    """Pair the most important absent pages of one layer with its least important slots. These hold nothing from now on.

    Args:
        maps, copies: of the layer; ``copies`` is overwritten.
        scores: ``[rows, 1, columns]``; ``table``: ``[rows, columns]`` int32 host pages.
        selected: slots ``[rows, lists, k]`` that hold selected pages, and how many ``[rows, lists]``.
        absent: logical pages ``[rows, 1, n]`` that were selected and are not resident, and how many ``[rows, 1]``
            (of several lists: `union_pages`).
        generations: ``[rows]`` int32 of the rows' regions when the host opened the step: by now a request may be
            released, and the copies are its own, not those of who comes after it.
        due: ``[1]`` int32: 0: plan nothing.
        keep: ``[rows, size]`` int32 scratch.
        tally: ``[COLUMNS]`` int64 of the layer, see `tally`: the copies are added.
    """
    rows, _, columns = scores.shape
    _, lists, k = selected[0].shape
    size, n, most = keep.shape[1], absent[0].shape[2], copies.slots.shape[1]
    _plan_kernel[(rows,)](
        *maps, scores, table, *selected, *absent, num_pages, regions, generations, due, keep, *copies, tally,
        k, n, most, columns, size, table.stride(0), lists, triton.next_power_of_2(max(k, n, size, most, 2)),
    )  # fmt: skip


def commit_pages(maps: Maps, copies: Copies, generations: Tensor) -> None:
    """Make the copied pages of all layers visible. To run once the copies are done, at the beginning of a step.

    A page whose region was released since (its generation, ``[regions]`` int64, moved on) stays invisible.
    """
    layers, rows, most = copies.slots.shape
    _, count, columns = maps.slot_of.shape
    _commit_kernel[(layers, rows)](
        *maps, copies.slots, copies.pages, copies.importance, copies.regions, copies.started, generations,
        rows, columns, maps.page_of.shape[1], count * columns, most, triton.next_power_of_2(most),
    )  # fmt: skip
