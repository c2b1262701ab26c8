"""Digests in codes (`kernels.codes`): encoded from whole pages, and scored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels import codes
from hybrid_backend.kernels.kv_format import head_dim_of
from hybrid_backend.kernels.triton.common import group_block, inverse, kernel, reuses, rounded
from hybrid_backend.kernels.triton.encoding import scales_at


@kernel("keys", "digests", "rotation", "page_stride", "head_stride", "token_stride")
def _encode_kernel(keys, digests, rotation, pages, counts, page_stride, head_stride, token_stride,
                   KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, PLANES: tl.constexpr,
                   FINE: tl.constexpr, CODED: tl.constexpr, LARGEST: tl.constexpr, EDGE: tl.constexpr,
                   INNER: tl.constexpr, OUTER: tl.constexpr, COARSE: tl.constexpr, HEADER: tl.constexpr,
                   LISTED: tl.constexpr, APPENDED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
                   BLOCK_L: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    page = tl.load(pages + i).to(tl.int64)
    if LISTED:
        is_whole = True
    else:
        count = tl.load(counts + i)
        is_whole = count % PAGE == PAGE - 1 if APPENDED else count == PAGE
    if (page >= 0) & is_whole:
        t, d, plane = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_L)
        inside = (t < PAGE)[:, None] & (d < DIM)[None, :]
        first = keys + (i.to(tl.int64) if LISTED else page) * page_stride + head * head_stride
        line = t.to(tl.int64)[:, None] * token_stride
        ENCODED: tl.constexpr = keys.dtype.element_ty == tl.int8
        key = tl.load(first + line + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if ENCODED:
            key *= tl.load(scales_at(first, 0, t, PAGE, DIM), mask=t < PAGE, other=0.0).to(tl.float32)[:, None]
        key = tl.where(tl.abs(key) < LARGEST, key, 0.0)
        high = tl.max(tl.where((t < PAGE)[:, None], key, float("-inf")), 0)
        low = tl.min(tl.where((t < PAGE)[:, None], key, float("inf")), 0)
        middle, half = (high + low) / 2, (high - low) / 2
        step = tl.max(tl.abs(middle), 0) / 127
        whole = rounded(middle * inverse(step))
        row = digests + (page * KV_HEADS + head) * 4 * DIM
        tl.store(row + d, (whole + 128).to(tl.uint8), mask=d < DIM)
        tl.debug_barrier()  # the bytes are read again below in chunks, since all channels do not fit the registers
        rest = tl.where(inside, key - (whole * step)[None, :], 0.0)
        size = tl.sqrt(tl.sum(rest * rest, 1) / DIM)  # a rotation does not change the size
        projected = tl.zeros([BLOCK_P], tl.float32)
        norm = tl.zeros([BLOCK_P], tl.float32)
        packed = tl.zeros([BLOCK_P, BLOCK_L], tl.float32)
        for start in range(0, CODED, CHUNK):  # rotated channels
            c = start + tl.arange(0, CHUNK)
            is_fine, is_coded = (c < FINE)[None, :], (c < CODED)[None, :]
            y = tl.zeros([BLOCK_P, CHUNK], tl.float32)
            for from_channel in range(0, DIM, PART):
                p = from_channel + tl.arange(0, PART)
                is_loaded = (t < PAGE)[:, None] & (p < DIM)[None, :]
                part = tl.load(first + line + p[None, :], mask=is_loaded, other=0.0).to(tl.float32)
                if ENCODED:  # The scales are loaded again, because they do not fit the registers beside the products.
                    part *= tl.load(scales_at(first, 0, t, PAGE, DIM), mask=t < PAGE, other=0.0).to(tl.float32)[:, None]
                part = tl.where(tl.abs(part) < LARGEST, part, 0.0)
                centre = step * (tl.load(row + p, mask=p < DIM, other=128).to(tl.float32) - 128)
                part = tl.where(is_loaded, part - centre[None, :], 0.0)
                turn = tl.load(rotation + p[:, None] * DIM + c[None, :], mask=(p < DIM)[:, None] & is_coded, other=0.0)
                y += tl.dot(part, turn, input_precision="tf32x3")
            positive, outer = y >= 0, tl.abs(y) > EDGE * size[:, None]
            level = tl.where(is_fine, tl.where(outer, OUTER, INNER), tl.where(is_coded, COARSE, 0.0))
            projected += tl.sum(tl.abs(y) * level, 1)
            norm += tl.sum(level * level, 1)
            # A byte is the sum of its channels' shifted bits, so the product with powers of two is exact.
            sign = positive.to(tl.int32)
            bits = tl.where(is_fine, 2 * sign + (outer == positive).to(tl.int32), sign)
            code = tl.where(c < FINE, c // 2, FINE // 2 + (c - FINE) // 4)
            shift = 4 * (code % 2) + tl.where(c < FINE, 2 * (c % 2), (c - FINE) % 4)
            is_there = (code // 2)[:, None] == plane[None, :]
            place = tl.where(is_there & (c < CODED)[:, None], (1 << shift)[:, None], 0)
            packed += tl.dot(bits.to(tl.float32), place.to(tl.float32), input_precision="tf32")
        scale = tl.where(t < PAGE, projected / norm, 0.0)
        unit = tl.max(scale, 0) / 255
        numbers = (row + DIM).to(tl.pointer_type(tl.float32))
        tl.store(numbers, step)
        tl.store(numbers + 1, tl.sqrt(tl.sum(half * half, 0) / DIM))
        tl.store(numbers + 2, unit)
        scales = row + DIM + HEADER
        tl.store(scales + t, rounded(scale * inverse(unit)).to(tl.uint8), mask=t < PAGE)
        to = scales + PAGE + (t // 16 * 16 * PLANES + t % 16)[:, None] + 16 * plane[None, :]
        tl.store(to, packed.to(tl.uint8), mask=(t < PAGE)[:, None] & (plane < PLANES)[None, :])


@triton.jit
def _levels(planes, t, d, PAGE: tl.constexpr, PLANES: tl.constexpr, FINE: tl.constexpr, CODED: tl.constexpr,
            INNER: tl.constexpr, OUTER: tl.constexpr, COARSE: tl.constexpr):  # fmt: skip
    """Return the coded values ``[tokens t, rotated channels d]`` of a page, fp32; 0 outside."""
    is_fine = (d < FINE)[None, :]
    code = tl.where(d < FINE, d // 2, FINE // 2 + (d - FINE) // 4)
    shift = (4 * (code % 2) + tl.where(d < FINE, 2 * (d % 2), (d - FINE) % 4))[None, :]
    coded = (t < PAGE)[:, None] & (d < CODED)[None, :]
    token = t // 16 * 16 * PLANES + t % 16
    byte = tl.load(planes + token[:, None] + 16 * (code // 2)[None, :], mask=coded, other=0)
    bits = byte.to(tl.int32) >> shift
    outer = (bits & 3 == 0) | (bits & 3 == 3)
    positive = tl.where(is_fine, bits & 2, bits & 1) > 0
    level = tl.where(is_fine, tl.where(outer, OUTER, INNER), COARSE)
    return tl.where(coded, tl.where(positive, level, -level), 0.0)


@kernel("q", "turned", "digests")
def _estimate_kernel(q, turned, digests, table, num_pages, budgets, epochs, list_epochs, logits, tops, sums, scale,
                    distortion, lists, columns, stride, tiles,
                    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                    PLANES: tl.constexpr, FINE: tl.constexpr, CODED: tl.constexpr, INNER: tl.constexpr,
                    OUTER: tl.constexpr, COARSE: tl.constexpr, HEADER: tl.constexpr, TILE: tl.constexpr,
                    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
                    CHUNK: tl.constexpr):  # fmt: skip
    """Score pages like `scores._score_kernel`, by codes; ``turned`` has the rotated queries in fp32.

    Codes are multiplied in chunks of ``CHUNK`` channels, since a product's operands lie in registers and shared memory.
    """
    row, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    pages = tl.load(num_pages + row)
    heads = KV_HEADS * GROUP
    g, t, d, column = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    query_head = row * heads + head * GROUP + g
    is_scored = (tile * TILE < pages) & (tl.load(budgets + row) < pages)
    if is_scored & (reuses(epochs, list_epochs, row, lists, pages) == 0):
        inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + query_head[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
        c = tl.arange(0, CHUNK)
        rotated = turned + query_head[:, None] * DIM
        if BLOCK_D == CHUNK:
            whole = tl.load(rotated + c[None, :], mask=(g < GROUP)[:, None] & (c < DIM)[None, :], other=0.0)
        spread = 0.5 * distortion * scale * scale * tl.sum(query * query, 1)
        estimates = tl.full([BLOCK_G, TILE], float("-inf"), tl.float32)
        for i in range(0, tl.minimum(TILE, pages - tile * TILE)):
            page = tl.load(table + row * stride + tile * TILE + i).to(tl.int64)
            row_start = digests + (page * KV_HEADS + head) * 4 * DIM
            numbers = (row_start + DIM).to(tl.pointer_type(tl.float32))
            middle = (tl.load(row_start + d, mask=d < DIM, other=128).to(tl.float32) - 128) * tl.load(numbers)
            base = scale * tl.sum(query * middle[None, :], 1)
            scales = tl.load(row_start + DIM + HEADER + t, mask=t < PAGE, other=0).to(tl.float32) * tl.load(numbers + 2)
            planes = row_start + DIM + HEADER + PAGE
            if BLOCK_D == CHUNK:
                levels = _levels(planes, t, c, PAGE, PLANES, FINE, CODED, INNER, OUTER, COARSE)
                product = tl.dot(whole, tl.trans(levels), input_precision="tf32x3")
            else:
                product = tl.zeros([BLOCK_G, BLOCK_P], tl.float32)
                for start in range(0, BLOCK_D, CHUNK):  # Each page loads the rotated query again.
                    channel = start + c
                    is_there = (g < GROUP)[:, None] & (channel < DIM)[None, :]
                    part = tl.load(rotated + channel[None, :], mask=is_there, other=0.0)
                    levels = _levels(planes, t, channel, PAGE, PLANES, FINE, CODED, INNER, OUTER, COARSE)
                    product = tl.dot(part, tl.trans(levels), product, input_precision="tf32x3")
            logit = base[:, None] + scale * scales[None, :] * product + spread[:, None] * (scales * scales)[None, :]
            logit = tl.where((t < PAGE)[None, :], logit, float("-inf"))
            top = tl.max(logit, 1)
            total = top + tl.log(tl.sum(tl.exp(logit - top[:, None]), 1))
            estimates = tl.where((column == i)[None, :], total[:, None], estimates)
        column += tile * TILE
        listed = column < pages
        tl.store(logits + query_head[:, None] * columns + column[None, :], estimates / scale,
                 mask=(g < GROUP)[:, None] & listed[None, :])  # fmt: skip
        shared = tl.where((column < pages - 1)[None, :], estimates, float("-inf"))
        top = tl.max(shared, 1)
        tl.store(tops + query_head * tiles + tile, top, mask=g < GROUP)
        base = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sums + query_head * tiles + tile, tl.sum(tl.exp(shared - base[:, None]), 1), mask=g < GROUP)


def encode(keys: Tensor, digests: Tensor, pages: Tensor, counts: Tensor | None = None, appended: bool = False) -> None:
    """Encode the digests of whole pages.

    Args:
        keys: ``[pages, kv_heads, page_size, head_dim]`` with contiguous channels: all pages of the layer, or, in 8
            bits, their first halves ``[pages, kv_heads, page_size, width]``. Without ``counts`` only the keys of
            ``pages``, in order.
        digests: ``[pages, kv_heads, 4 * head_dim]`` uint8, updated in place.
        pages: ``[n]`` int32; -1: no page.
        counts: ``[n]`` int32 tokens of each page; pages that are not whole are skipped. None: all pages are whole.
        appended: ``counts`` has the position of the token that was just written instead.
    """
    (_, kv_heads, page_size, _), dim = keys.shape, head_dim_of(keys)
    page_stride, head_stride, token_stride = keys.stride()[:3]
    if keys.dtype is torch.int8:
        token_stride = dim  # The scales stand behind the rows of K and V.
    channels = 64 if dim <= 64 else 32 if page_size * dim <= 2048 else 16  # More do not fit the registers.
    layout = codes.Layout(page_size, dim)
    if len(pages):
        _encode_kernel[(len(pages), kv_heads)](
            keys, digests, codes.rotation(dim, keys.device), pages, counts, page_stride, head_stride, token_stride,
            kv_heads, page_size, dim, layout.planes, layout.fine, layout.coded, codes.LARGEST, codes.FINE,
            codes.INNER, codes.OUTER, codes.COARSE, codes.HEADER, counts is None, appended,
            triton.next_power_of_2(page_size), triton.next_power_of_2(dim),
            max(16, triton.next_power_of_2(layout.planes)), 16, min(channels, triton.next_power_of_2(dim)),
        )  # fmt: skip


def estimate(
    q: Tensor, digests: Tensor, table: Tensor, num_pages: Tensor, budgets: Tensor,
    epochs: tuple[Tensor | None, Tensor | None], lists: int, logits: Tensor, tops: Tensor, sums: Tensor, scale: float,
    page_size: int, tile: int,
) -> None:  # fmt: skip
    """Fill ``logits``, ``tops`` and ``sums`` like `scores._score_kernel`, by codes.

    ``epochs`` comes from `reuse_pointers`, and ``lists`` is the number of lists of a row.
    """
    rows, heads, dim = q.shape
    kv_heads, tiles = digests.shape[1], tops.shape[2]
    layout = codes.Layout(page_size, dim)
    turned = torch.matmul(q.float(), codes.rotation(dim, q.device))
    _estimate_kernel[(rows, kv_heads, tiles)](
        q, turned, digests, table, num_pages, budgets, *epochs, logits, tops, sums, scale, layout.distortion, lists,
        table.shape[1], table.stride(0), tiles,
        kv_heads, heads // kv_heads, page_size, dim, layout.planes, layout.fine, layout.coded, codes.INNER, codes.OUTER,
        codes.COARSE, codes.HEADER, tile, group_block(heads // kv_heads), triton.next_power_of_2(page_size),
        triton.next_power_of_2(dim), triton.next_power_of_2(dim) if dim <= 128 else 64,
    )  # fmt: skip
