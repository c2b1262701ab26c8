"""Kernels that update the residency maps (`operations.Maps`): pages are opened, noted, recalled and committed.

Frame i of request r, of ``count`` requests, has number i * count + r, so that a layer may have fewer frames than
another one. The maps of all layers are stacked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.operations import Copies, Maps
from hybrid_backend.kernels.triton.common import COPY_PROGRAMS, kernel, ordered
from hybrid_backend.kernels.triton.counters import RECALLED_PAGES

COPY_BLOCK = 4096  # elements that a program copies at once
_SORTED = 512  # absent pages that a program sorts at once, if it has no more frames than that
_ENTRIES = 64  # entries of a list that a program reads at once


@kernel()
def _open_kernel(frame_of, page_of, importance, requests, pages, positions, sinks, columns, size, count,
                 PAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    layer, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if (tl.load(pages + row) >= 0) & (position % PAGE == 0):
        request, page = tl.load(requests + row).to(tl.int64), position // PAGE
        own_frames = frame_of + (layer * count + request) * columns
        entry = own_frames + page
        if tl.load(entry) < 0:  # If the page has a frame, a failed step has opened the page before.
            s = tl.arange(0, BLOCK)
            first = layer * size * count
            score = tl.load(importance + first + s * count + request, mask=s < size, other=float("inf"))
            frame = tl.argmin(score, 0) * count + request
            old = tl.load(page_of + first + frame)
            if old >= 0:
                tl.store(own_frames + old, -1)
            tl.store(page_of + first + frame, page)
            # The youngest page outranks older pages where importance is age. Elsewhere a selection overwrites it.
            tl.store(importance + first + frame, tl.where(page < sinks, float("inf"), page.to(tl.float32)))
            tl.store(entry, frame.to(tl.int32))


@triton.jit
def _noted(page_of, importance, scores, pages, budget, sinks, recent, columns, size, count, LISTS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Store and return the importance of a request's frames by the scores of its row.

    A row that may select all pages keeps its importance. ``page_of`` and ``importance`` point to the request's first
    frame, ``scores`` to the row.
    """
    s = tl.arange(0, BLOCK)
    noted = tl.load(importance + s * count, mask=s < size, other=float("-inf"))
    if budget < pages:
        page = tl.load(page_of + s * count, mask=s < size, other=-1)
        has_page = page >= 0
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for listing in range(LISTS):
            score = tl.load(scores + listing * columns + page, mask=has_page & (page < pages), other=0.0)
            best = tl.maximum(best, score)
        best = tl.where((page < sinks) | (page >= pages - recent), float("inf"), best)
        # An empty frame of infinite importance is reserved for a page that is on its way.
        noted = tl.where(has_page, best, tl.where(noted == float("inf"), noted, float("-inf")))
        tl.store(importance + s * count, noted, mask=s < size)
    return noted


@kernel()
def _note_kernel(page_of, importance, scores, num_pages, budgets, requests, sinks, recent, columns, size, count,
                 LISTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pages = tl.load(num_pages + row)
    if pages > 0:
        request = tl.load(requests + row).to(tl.int64)
        _noted(page_of + request, importance + request, scores + row * LISTS * columns, pages, tl.load(budgets + row),
               sinks, recent, columns, size, count, LISTS, BLOCK)  # fmt: skip


@triton.jit
def _wanted(absent, scores, i, listed):
    """Return sort keys of the entries ``i`` of a list of absent pages by score; entries beyond the list sort lowest."""
    page = tl.load(absent + i, mask=i < listed, other=0)
    score = tl.load(scores + page, mask=i < listed, other=0.0)
    return tl.where(i < listed, ordered(score) * 4294967296 + i, -((1 << 63) - 1))


@kernel()
def _plan_kernel(frame_of, page_of, importance, scores, table, selected, selected_count, absent, absent_count,
                 num_pages, budgets, requests, generations, ages, keep, to_frames, to_host, to_pages, to_importance,
                 to_requests, to_started, counters, sinks, recent, interval, phase, selected_k, absent_k, most, columns,
                 frame_columns, size, count, table_stride, LISTS: tl.constexpr, LONGER: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tl.store(to_frames + row * most + i, -1, mask=i < most)
    pages = tl.load(num_pages + row)
    request = tl.where(pages > 0, tl.load(requests + row), 0).to(tl.int64)
    noted = tl.full([BLOCK], float("-inf"), tl.float32)
    if pages > 0:
        noted = _noted(page_of + request, importance + request, scores + row * columns, pages, tl.load(budgets + row),
                       sinks, recent, columns, size, count, 1, BLOCK)  # fmt: skip
    listed, age = tl.load(absent_count + row), tl.load(ages + row)
    is_due = (age == 0) | ((age + phase) % interval == 0)
    if is_due & (pages > 0) & (listed > 0):
        # Mark the request's frames whose pages any list selected: they are not overwritten.
        tl.store(keep + row * size + i, 0, mask=i < size)
        tl.debug_barrier()
        for listing in range(LISTS):
            is_selected = i < tl.load(selected_count + row * LISTS + listing)
            frame = tl.load(selected + (row * LISTS + listing) * selected_k + i, mask=is_selected, other=0)
            tl.store(keep + row * size + frame // count, 1, mask=is_selected)
        tl.debug_barrier()
        is_kept = tl.load(keep + row * size + i, mask=i < size, other=1) > 0
        # The least important frames are paired with the most important absent pages.
        no_key: tl.constexpr = (1 << 63) - 1  # above all keys; its negative is below all keys
        key = tl.where(is_kept | (noted == float("inf")), no_key, ordered(noted) * 4294967296 + i)
        victims = tl.sort(key)
        if LONGER:  # merges the best pages so far, in descending order, with the next tile, in ascending order
            candidates = tl.full([BLOCK], -no_key, tl.int64)
            for first in range(0, listed, BLOCK):
                others = tl.sort(_wanted(absent + row * absent_k, scores + row * columns, first + i, listed))
                candidates = tl.sort(tl.maximum(candidates, others), descending=True)
        else:
            candidates = tl.sort(_wanted(absent + row * absent_k, scores + row * columns, i, listed), descending=True)
        paired = (victims < no_key) & (candidates > -no_key) & (i < most)
        frame = (victims & 0xFFFFFFFF) * count + request
        page = tl.load(absent + row * absent_k + (candidates & 0xFFFFFFFF), mask=paired, other=0)
        old = tl.load(page_of + frame, mask=paired, other=-1)
        tl.store(frame_of + request * frame_columns + old, -1, mask=paired & (old >= 0))
        tl.store(page_of + frame, -1, mask=paired)
        tl.store(importance + frame, float("-inf"), mask=paired)
        entry = row * most + i
        tl.store(to_frames + entry, frame.to(tl.int32), mask=paired)
        tl.store(to_host + entry, tl.load(table + row * table_stride + page, mask=paired, other=0), mask=paired)
        tl.store(to_pages + entry, page, mask=paired)
        score = tl.load(scores + row * columns + page, mask=paired, other=0.0)
        tl.store(to_importance + entry, tl.where(score == score, score, float("-inf")), mask=paired)
        tl.store(to_requests + row, request.to(tl.int32))
        tl.store(to_started + row, tl.load(generations + row).to(tl.int64))
        if counters is not None:
            tl.atomic_add(counters + RECALLED_PAGES, tl.sum(paired.to(tl.int64), 0), sem="relaxed")


@kernel()
def _commit_kernel(frame_of, page_of, importance, to_frames, to_pages, to_importance, to_requests, to_started,
                   generations, rows, columns, all_frames, all_columns, most, BLOCK: tl.constexpr):  # fmt: skip
    layer, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    line = layer * rows + row
    frame = tl.load(to_frames + line * most + i, mask=i < most, other=-1)
    request = tl.load(to_requests + line).to(tl.int64)
    is_current = tl.load(to_started + line) == tl.load(generations + request)
    live = tl.where(is_current, frame, -1) >= 0
    page = tl.load(to_pages + line * most + i, mask=live, other=0)
    tl.store(page_of + layer * all_frames + frame, page, mask=live)
    tl.store(importance + layer * all_frames + frame, tl.load(to_importance + line * most + i, mask=live, other=0.0),
             mask=live)  # fmt: skip
    tl.store(frame_of + layer * all_columns + request * columns + page, frame, mask=live)
    tl.store(to_frames + line * most + i, -1, mask=i < most)  # a copy is committed once


def open_pages(maps: Maps, requests: Tensor, pages: Tensor, positions: Tensor, page_size: int, sinks: int) -> None:
    layers, count, columns = maps.frame_of.shape
    _open_kernel[(layers, len(requests))](
        *maps, requests, pages, positions, sinks, columns, maps.size, count, page_size,
        triton.next_power_of_2(maps.size),
    )  # fmt: skip


def note_scores(
    maps: Maps, scores: Tensor, num_pages: Tensor, budgets: Tensor, requests: Tensor, sinks: int, recent: int
) -> None:
    rows, lists, columns = scores.shape
    _note_kernel[(rows,)](
        maps.page_of, maps.importance, scores, num_pages, budgets, requests, sinks, max(recent, 1), columns,
        maps.size, len(maps.frame_of), lists, triton.next_power_of_2(maps.size),
    )  # fmt: skip


def plan_recall(
    maps: Maps, copies: Copies, scores: Tensor, table: Tensor, selected: tuple[Tensor, Tensor],
    absent: tuple[Tensor, Tensor], num_pages: Tensor, budgets: Tensor, requests: Tensor, generations: Tensor,
    ages: Tensor, sinks: int, recent: int, interval: int, phase: int, keep: Tensor, counters: Tensor | None = None,
) -> None:  # fmt: skip
    rows, _, columns = scores.shape
    _, lists, k = selected[0].shape
    (count, frame_columns), n, most = maps.frame_of.shape, absent[0].shape[2], copies.frames.shape[1]
    block = int(triton.next_power_of_2(max(min(n, _SORTED), maps.size, most, 2)))
    _plan_kernel[(rows,)](
        *maps, scores, table, *selected, *absent, num_pages, budgets, requests, generations, ages, keep, *copies,
        counters, sinks, max(recent, 1), interval, phase, k, n, most, columns, frame_columns, maps.size, count,
        table.stride(0), lists, n > block, block, num_warps=8 if block >= 256 else 4,
    )  # fmt: skip


def commit_pages(maps: Maps, copies: Copies, generations: Tensor) -> None:
    layers, rows, most = copies.frames.shape
    _, count, columns = maps.frame_of.shape
    _commit_kernel[(layers, rows)](
        *maps, copies.frames, copies.pages, copies.importance, copies.requests, copies.started, generations,
        rows, columns, maps.page_of.shape[1], count * columns, most, triton.next_power_of_2(most),
    )  # fmt: skip


@kernel("host", "frames", "page_elements")
def _copy_kernel(host, frames, host_pages, frame_ids, entries, page_elements, TILE: tl.constexpr, BLOCK: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    for begin in range(0, entries, programs * TILE):
        # Neighbouring entries go to different programs, because copies come in runs.
        entry = begin + tl.arange(0, TILE) * programs + program
        some = tl.max(tl.load(frame_ids + entry, mask=entry < entries, other=-1), 0) >= 0
        last = tl.where(some, tl.minimum(begin + TILE * programs, entries), 0)
        for i in range(begin + program, last, programs):
            frame = tl.load(frame_ids + i).to(tl.int64)
            if frame >= 0:
                page = tl.load(host_pages + i).to(tl.int64)
                for first in range(0, page_elements, BLOCK):
                    element = first + tl.arange(0, BLOCK)
                    inside = element < page_elements
                    values = tl.load(host + page * page_elements + element, mask=inside)
                    tl.store(frames + frame * page_elements + element, values, mask=inside)


def copy_pages(host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor) -> None:
    if frame_ids.numel():
        _copy_kernel[(min(COPY_PROGRAMS, frame_ids.numel()),)](
            host, frames, host_pages, frame_ids, frame_ids.numel(), host[0].numel(), _ENTRIES, COPY_BLOCK, num_warps=8
        )
