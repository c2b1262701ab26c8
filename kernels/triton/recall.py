"""Recall: pages copied from pinned host memory into slots by the device itself."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # elements that a program copies


@triton.jit
def _copy_kernel(host, slots, host_pages, slot_ids, page_elements, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    slot = tl.load(slot_ids + i).to(tl.int64)
    if slot >= 0:
        page = tl.load(host_pages + i).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < page_elements
        tl.store(slots + slot * page_elements + at, tl.load(host + page * page_elements + at, mask=inside), mask=inside)


def copy_pages(host: Tensor, slots: Tensor, host_pages: Tensor, slot_ids: Tensor) -> None:
    """Copy whole pages over the slots that were chosen for them.

    Args:
        host: ``[pages, kv_heads, 2, page_size, head_dim]``: host pages as the device sees them; ``slots``: the same
            layout on the device.
        host_pages, slot_ids: int32 of the same shape; an entry whose slot is -1 is none.
    """
    elements = host[0].numel()
    if slot_ids.numel():
        _copy_kernel[(slot_ids.numel(), triton.cdiv(elements, _BLOCK))](
            host, slots, host_pages, slot_ids, elements, _BLOCK
        )
