"""A decode step's new tokens: into the host page, the slot and the digest, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["columns"])
def _append_kernel(key, value, host, slots, digests, pages, positions, regions, slot_of, columns,
                   KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                   HAS_SLOTS: tl.constexpr, HAS_DIGESTS: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page = tl.load(pages + row).to(tl.int64)
    if page >= 0:
        offset = tl.load(positions + row) % PAGE
        d = tl.arange(0, BLOCK_D)
        live = d < DIM
        k = tl.load(key + (row * KV_HEADS + head) * DIM + d, mask=live)
        v = tl.load(value + (row * KV_HEADS + head) * DIM + d, mask=live)
        at = ((page * KV_HEADS + head) * 2 * PAGE + offset) * DIM + d
        tl.store(host + at, k, mask=live)
        tl.store(host + at + PAGE * DIM, v, mask=live)
        if HAS_SLOTS:
            entry = tl.load(regions + row).to(tl.int64) * columns + tl.load(positions + row) // PAGE
            slot = tl.load(slot_of + entry).to(tl.int64)
            if slot >= 0:
                at = ((slot * KV_HEADS + head) * 2 * PAGE + offset) * DIM + d
                tl.store(slots + at, k, mask=live)
                tl.store(slots + at + PAGE * DIM, v, mask=live)
        if HAS_DIGESTS:
            to = digests + (page * KV_HEADS + head) * 2 * DIM + d
            kind = digests.dtype.element_ty
            new = k.to(tl.float32)
            high, low = tl.load(to, mask=live).to(tl.float32), tl.load(to + DIM, mask=live).to(tl.float32)
            fresh = offset == 0  # whatever the page held before
            tl.store(to, tl.where(fresh, new, tl.maximum(high, new)).to(kind), mask=live)
            tl.store(to + DIM, tl.where(fresh, new, tl.minimum(low, new)).to(kind), mask=live)


def append_tokens(
    k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor,
    slots: Tensor | None = None, regions: Tensor | None = None, slot_of: Tensor | None = None,
    digests: Tensor | None = None,
) -> None:  # fmt: skip
    """Write one new token per row.

    Args:
        k, v: ``[rows, kv_heads, head_dim]``, contiguous.
        host: ``[pages, kv_heads, 2, page_size, head_dim]``: host pages as the device sees them (pinned, UVA).
        pages: ``[rows]`` int32 host page of the token; -1: a row of padding. Distinct otherwise.
        positions: ``[rows]`` int32 or int64 position of the token in its sequence.
        slots: of the layout of ``host``; ``regions``: ``[rows]`` int32; ``slot_of``: ``[regions, columns]`` int32
            slot of each logical page, -1: none.
        digests: ``[pages, kv_heads, 2, head_dim]``; a token at offset 0 makes its page new.
    """
    rows, kv_heads, dim = k.shape
    if rows:
        _append_kernel[(rows, kv_heads)](
            k, v, host, slots, digests, pages, positions, regions, slot_of,
            0 if slot_of is None else slot_of.shape[1],
            kv_heads, host.shape[3], dim, triton.next_power_of_2(dim), slots is not None, digests is not None,
        )  # fmt: skip
