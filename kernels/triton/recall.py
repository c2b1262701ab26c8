"""Recall: pages copied from pinned host memory into slots by the device itself, and when they become visible."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # elements that a program copies


@triton.jit
def _copy_kernel(host, slots, host_pages, slot_ids, count, page_elements, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    if i < tl.load(count):
        page, slot = tl.load(host_pages + i).to(tl.int64), tl.load(slot_ids + i).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < page_elements
        tl.store(slots + slot * page_elements + at, tl.load(host + page * page_elements + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["columns", "size"])
def _commit_kernel(slot_of, page_of, regions, slot_ids, pages, started, generations, count, columns, size):
    i = tl.program_id(0)
    if i < tl.load(count):
        region = tl.load(regions + i).to(tl.int64)
        if tl.load(started + i) == tl.load(generations + region):
            slot, page = tl.load(slot_ids + i), tl.load(pages + i)
            old = tl.load(page_of + slot)
            if old >= 0:
                tl.store(slot_of + region * columns + old, -1)
            tl.store(page_of + slot, page)
            tl.store(slot_of + region * columns + page, slot)


def copy_pages(host: Tensor, slots: Tensor, host_pages: Tensor, slot_ids: Tensor, count: Tensor) -> None:
    """Copy whole pages over the slots that were chosen for them.

    Args:
        host: ``[pages, kv_heads, 2, page_size, head_dim]``: host pages as the device sees them; ``slots``: the same
            layout on the device.
        host_pages, slot_ids: ``[n]`` int32; ``count``: ``[1]`` int32, how many of them count.
    """
    elements = host[0].numel()
    if len(host_pages):
        _copy_kernel[(len(host_pages), triton.cdiv(elements, _BLOCK))](
            host, slots, host_pages, slot_ids, count, elements, _BLOCK
        )


def commit_pages(
    slot_of: Tensor, page_of: Tensor, regions: Tensor, slot_ids: Tensor, pages: Tensor, started: Tensor,
    generations: Tensor, count: Tensor,
) -> None:  # fmt: skip
    """Make copied pages visible: from here on `select_pages` finds them. To run between two steps.

    A page whose region was released since its copy began (its generation moved on) stays invisible.

    Args:
        slot_of: ``[regions, columns]`` int32: slot of each logical page, -1: not resident.
        page_of: ``[regions * size]`` int32: logical page of each slot, -1: empty. The inverse of ``slot_of``.
        regions, slot_ids, pages: ``[n]`` int32: of each copy, the region, the slot and the logical page.
        started: ``[n]`` int64 generation of the region when the copy began; ``generations``: ``[regions]`` int64.
        count: ``[1]`` int32.
    """
    if len(slot_ids):
        _commit_kernel[(len(slot_ids),)](
            slot_of, page_of, regions, slot_ids, pages, started, generations, count,
            slot_of.shape[1], page_of.numel() // slot_of.shape[0],
        )  # fmt: skip
