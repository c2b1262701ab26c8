"""Kernels that write new tokens to host pages, frames and digests, and that compute digests of pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.digest_format import CODES, digest_format_of
from hybrid_backend.kernels.kv_format import head_dim_of
from hybrid_backend.kernels.operations import AwaitedPages
from hybrid_backend.kernels.triton import codes
from hybrid_backend.kernels.triton.common import COPY_PROGRAMS, byte_tail, inverse, kernel, rounded
from hybrid_backend.kernels.triton.encoding import EXACT, encoded, scale_of, scales_at
from hybrid_backend.kernels.triton.signal import await_pages

_TILE = 16  # tokens of a head that a program stores at once: K and V of 128 channels in 16 bits are 8 KiB


@triton.jit
def _store_digest(digests, item, high, low, d, DIM: tl.constexpr, TAIL: tl.constexpr):
    """Store one KV head's digest of one page (``item``): maxima and minima, or bytes if TAIL > 0."""
    live = d < DIM
    if TAIL:
        to = digests + item * (2 * DIM + TAIL)
        _store_bytes(to, to + 2 * DIM, high, d, DIM)
        _store_bytes(to + DIM, to + 2 * DIM + 4, low, d, DIM)
    else:
        to = digests + item * 2 * DIM + d
        tl.store(to, high.to(digests.dtype.element_ty), mask=live)
        tl.store(to + DIM, low.to(digests.dtype.element_ty), mask=live)


@triton.jit
def _store_bytes(to, scale_at, values, d, DIM: tl.constexpr):
    """Store values as bytes at ``to``, and their scale at ``scale_at``."""
    values = tl.where((d < DIM) & (tl.abs(values) < float("inf")), values, 0.0)
    scale = tl.max(tl.abs(values), 0) / 127
    tl.store(to + d, (rounded(values * inverse(scale)) + 128).to(tl.uint8), mask=d < DIM)
    tl.store(scale_at.to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def _encoded_row(row):
    """Return the numbers in 8 bits and the scale of a token's K or V of one head."""
    row = row.to(tl.float32)
    scale, factor = scale_of(row, 0)
    return encoded(row, factor), scale


@triton.jit
def _store_row(pages, head_page, offset, row, scale, d, PART: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Store a token's K (``PART`` 0) or V (1) of one head in a page; ``scale`` is read if pages are in 8 bits."""
    if pages.dtype.element_ty == tl.int8:
        first = pages + head_page * (2 * PAGE * (DIM + 2))
        tl.store(scales_at(pages, head_page, PART * PAGE + offset, PAGE, DIM), scale)
    else:
        first = pages + head_page * (2 * PAGE * DIM)
    tl.store(first + (PART * PAGE + offset) * DIM + d, row, mask=d < DIM)


@triton.jit
def _keys_of(pages, head_page, t, d, is_read, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Load the keys ``[tokens t, channels d]`` of a head page where ``is_read``, decoded to fp32; 0 elsewhere."""
    mask = is_read[:, None] & (d < DIM)[None, :]
    if pages.dtype.element_ty == tl.int8:
        first = pages + head_page * (2 * PAGE * (DIM + 2))
        scales = tl.load(scales_at(pages, head_page, t, PAGE, DIM), mask=is_read, other=0.0).to(tl.float32)
        keys = tl.load(first + t[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32) * scales[:, None]
    else:
        first = pages + head_page * (2 * PAGE * DIM)
        keys = tl.load(first + t[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return keys


@kernel("key", "value", "host", "frames", "digests", "key_stride", "value_stride")
def _append_kernel(key, value, host, frames, digests, pages, positions, requests, frame_of, heads, columns,
                   key_stride, value_stride, expected, arrived, number, late, time_left, indices,
                   KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                   HAS_FRAMES: tl.constexpr, HAS_DIGESTS: tl.constexpr, TAIL: tl.constexpr,
                   BLOCK_P: tl.constexpr, STEPS: tl.constexpr, REAL: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page = tl.load(pages + row).to(tl.int64)
    if page >= 0:
        # The page of the new token may be on its way, too. Its copy must not come after the token.
        await_pages(expected, arrived, number, late, time_left, requests, row, indices, STEPS, REAL)
        offset = tl.load(positions + row) % PAGE
        d = tl.arange(0, BLOCK_D)
        live = d < DIM
        source = head.to(tl.int64)
        if heads is not None:
            source = tl.load(heads + head)
        k = tl.load(key + row * key_stride + source * DIM + d, mask=live, other=0.0)
        v = tl.load(value + row * value_stride + source * DIM + d, mask=live, other=0.0)
        new, k_scale, v_scale = k.to(tl.float32), 0.0, 0.0
        if host.dtype.element_ty == tl.int8:
            k, k_scale = _encoded_row(k)
            v, v_scale = _encoded_row(v)
            new = k.to(tl.float32) * k_scale.to(tl.float32)
        item = page * KV_HEADS + head
        _store_row(host, item, offset, k, k_scale, d, 0, PAGE, DIM)
        _store_row(host, item, offset, v, v_scale, d, 1, PAGE, DIM)
        if HAS_FRAMES:
            entry = tl.load(requests + row).to(tl.int64) * columns + tl.load(positions + row) // PAGE
            frame = tl.load(frame_of + entry).to(tl.int64)
            if frame >= 0:
                _store_row(frames, frame * KV_HEADS + head, offset, k, k_scale, d, 0, PAGE, DIM)
                _store_row(frames, frame * KV_HEADS + head, offset, v, v_scale, d, 1, PAGE, DIM)
        if HAS_DIGESTS:
            if TAIL:
                if offset == PAGE - 1:  # the page is whole now; its other keys are read from its frame if it has one
                    t = tl.arange(0, BLOCK_P)
                    before = t < PAGE - 1
                    if HAS_FRAMES:
                        near, is_near = frame * KV_HEADS + head, before & (frame >= 0)
                        keys = _keys_of(frames, near, t, d, is_near, PAGE, DIM)
                        keys += _keys_of(host, item, t, d, before & (frame < 0), PAGE, DIM)
                    else:
                        keys = _keys_of(host, item, t, d, before, PAGE, DIM)
                    is_key = before[:, None] & live[None, :]
                    high = tl.maximum(new, tl.max(tl.where(is_key, keys, float("-inf")), 0))
                    low = tl.minimum(new, tl.min(tl.where(is_key, keys, float("inf")), 0))
                    _store_digest(digests, item, high, low, d, DIM, TAIL)
            else:
                begins = offset == 0  # a new page's old digest is ignored
                to = digests + item * 2 * DIM + d
                high, low = tl.load(to, mask=live).to(tl.float32), tl.load(to + DIM, mask=live).to(tl.float32)
                high, low = tl.where(begins, new, tl.maximum(high, new)), tl.where(begins, new, tl.minimum(low, new))
                _store_digest(digests, item, high, low, d, DIM, TAIL)


def append_tokens(
    k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor,
    frames: Tensor | None = None, requests: Tensor | None = None, frame_of: Tensor | None = None,
    digests: Tensor | None = None, heads: Tensor | None = None, awaited: AwaitedPages | None = None,
) -> None:  # fmt: skip
    rows, dim = k.shape[0], k.shape[2]
    kv_heads, page_size = host.shape[1], host.shape[3]
    coded = digests if digests is not None and digest_format_of(digests, dim) is CODES else None
    if rows:
        _append_kernel[(rows, kv_heads)](
            k, v, host, frames, digests if coded is None else None, pages, positions, requests, frame_of, heads,
            0 if frame_of is None else frame_of.shape[1], k.stride(0), v.stride(0),
            *((None,) * 5 if awaited is None else awaited), 0 if awaited is None else len(awaited.expected),
            kv_heads, page_size, dim, triton.next_power_of_2(dim), frames is not None,
            digests is not None and coded is None, byte_tail(digests, dim), triton.next_power_of_2(page_size),
            1 if awaited is None else len(awaited.late), not triton.knobs.runtime.interpret, **EXACT,
        )  # fmt: skip
    if coded is not None:
        codes.encode(host[:, :, 0], coded, pages, positions, appended=True)


@kernel("key", "value", "host")
def _store_kernel(key, value, host, pages, positions, tokens, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
                  DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    program, programs, d = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK_D)
    ENCODED: tl.constexpr = host.dtype.element_ty == tl.int8
    ITEM: tl.constexpr = 2 * PAGE * (DIM + 2) if ENCODED else 2 * PAGE * DIM
    for item in range(program, tl.cdiv(tokens, TILE) * KV_HEADS, programs):
        head, t = item % KV_HEADS, item // KV_HEADS * TILE + tl.arange(0, TILE)
        page = tl.load(pages + t, mask=t < tokens, other=-1).to(tl.int64)
        offset = tl.load(positions + t, mask=t < tokens, other=0) % PAGE
        live = (page >= 0)[:, None] & (d < DIM)[None, :]
        source = ((t.to(tl.int64) * KV_HEADS + head) * DIM)[:, None] + d[None, :]
        to = ((page * KV_HEADS + head) * ITEM + offset * DIM)[:, None] + d[None, :]
        k, v = tl.load(key + source, mask=live, other=0.0), tl.load(value + source, mask=live, other=0.0)
        if ENCODED:
            k, v = k.to(tl.float32), v.to(tl.float32)
            k_scale, k_factor = scale_of(k, 1)
            v_scale, v_factor = scale_of(v, 1)
            k, v = encoded(k, k_factor[:, None]), encoded(v, v_factor[:, None])
            scale_at = scales_at(host, page * KV_HEADS + head, offset, PAGE, DIM)
            tl.store(scale_at, k_scale, mask=page >= 0)
            tl.store(scale_at + PAGE, v_scale, mask=page >= 0)
        tl.store(host + to, k, mask=live)
        tl.store(host + to + PAGE * DIM, v, mask=live)


def store_tokens(k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor) -> None:
    tokens, kv_heads, dim = k.shape
    programs = min(COPY_PROGRAMS, triton.cdiv(tokens, _TILE) * kv_heads)
    if programs:
        _store_kernel[(programs,)](
            k, v, host, pages, positions, tokens, kv_heads, host.shape[3], dim, _TILE, triton.next_power_of_2(dim),
            **EXACT,
        )  # fmt: skip


@kernel("key", "digests", "key_stride")
def _extend_kernel(key, digests, pages, key_stride, tokens, first, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
                   DIM: tl.constexpr, TAIL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    slot, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    live, t = d < DIM, i * PAGE - first + slot
    inside = ((slot < PAGE) & (t >= 0) & (t < tokens))[:, None] & live[None, :]
    keys = tl.load(key + t[:, None].to(tl.int64) * key_stride + head * DIM + d[None, :], mask=inside, other=0.0)
    keys = keys.to(tl.float32)
    high = tl.max(tl.where(inside, keys, float("-inf")), 0)
    low = tl.min(tl.where(inside, keys, float("inf")), 0)
    item = tl.load(pages + i).to(tl.int64) * KV_HEADS + head
    if not TAIL:
        to = digests + item * 2 * DIM + d
        is_older = live & (i == 0) & (first > 0)  # the first page began in an earlier chunk
        high = tl.maximum(high, tl.load(to, mask=is_older, other=float("-inf")).to(tl.float32))
        low = tl.minimum(low, tl.load(to + DIM, mask=is_older, other=float("inf")).to(tl.float32))
    _store_digest(digests, item, high, low, d, DIM, TAIL)


def extend_digests(k: Tensor, digests: Tensor, pages: Tensor, first: int, page_size: int) -> None:
    tokens, kv_heads, dim = k.shape
    if digest_format_of(digests, dim) is CODES:
        keys = k.unflatten(0, (-1, page_size)).transpose(1, 2)
        codes.encode(keys, digests, pages)
    elif len(pages):
        _extend_kernel[(len(pages), kv_heads)](
            k, digests, pages, k.stride(0), tokens, first,
            kv_heads, page_size, dim, byte_tail(digests, dim), triton.next_power_of_2(page_size),
            triton.next_power_of_2(dim),
        )  # fmt: skip


@kernel("kv", "digests")
def _build_kernel(kv, digests, pages, tokens, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                  TAIL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    page = tl.load(pages + i).to(tl.int64)
    count = tl.load(tokens + i)
    if (page >= 0) & (count >= (PAGE if TAIL else 1)):
        t, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
        written = (t < count)[:, None] & (d < DIM)[None, :]
        keys = _keys_of(kv, page * KV_HEADS + head, t, d, t < count, PAGE, DIM)
        high = tl.max(tl.where(written, keys, float("-inf")), 0)
        low = tl.min(tl.where(written, keys, float("inf")), 0)
        _store_digest(digests, page * KV_HEADS + head, high, low, d, DIM, TAIL)


def build_digests(kv: Tensor, digests: Tensor, pages: Tensor, tokens: Tensor) -> None:
    (_, kv_heads, _, page_size, _), dim = kv.shape, head_dim_of(kv)
    if digest_format_of(digests, dim) is CODES:
        codes.encode(kv[:, :, 0], digests, pages, tokens)
    elif len(pages):
        _build_kernel[(len(pages), kv_heads)](
            kv, digests, pages, tokens,
            kv_heads, page_size, dim, byte_tail(digests, dim), triton.next_power_of_2(page_size),
            triton.next_power_of_2(dim),
        )  # fmt: skip
