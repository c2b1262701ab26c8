"""Functions of kernels for pages in 8 bits (`kv_format`): numbers and scales, and where they lie.

A kernel learns from the type of the pages' pointer whether they are in 8 bits. Kernels that encode are launched without
fused multiply-adds (`EXACT`), so that a page has the same bytes whoever writes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_backend.kernels.triton.common import dot

EXACT = {"enable_fp_fusion": False}
"""Options of a launch that encodes: a fused product is not rounded before the sum that rounds it to a whole number."""


@triton.jit
def scale_of(x, AXIS: tl.constexpr):
    """Return the fp16 scales of rows along ``AXIS`` of fp32 ``x``, and the factors that encode them (0: no number).

    A scale is the largest magnitude / 127, rounded up; NaN if that is not finite or too large.
    """
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS).to(tl.float32, bitcast=True)
    exact = tl.div_rn(largest, 127.0)
    nearest = exact.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True)
    bits = tl.where(nearest.to(tl.float32) < exact, bits + 1, bits)
    bits = tl.where(exact <= 65504.0, bits, 0x7E00).to(tl.int16)
    scale = bits.to(tl.float16, bitcast=True)
    wide = scale.to(tl.float32)
    return scale, tl.where(wide > 0, tl.div_rn(1.0, tl.where(wide > 0, wide, 1.0)), 0.0)


@triton.jit
def encoded(x, factor):
    """Return the numbers of fp32 ``x``, rounded to nearest, whose factors `scale_of` has returned."""
    return tl.where(factor > 0, (x * factor + 12582912.0) - 12582912.0, 0.0).to(tl.int8)


@triton.jit
def scales_at(pages, head_page, token, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Return pointers to the scales of the keys of tokens; those of values lie ``PAGE`` scales behind."""
    first = pages + head_page * (2 * PAGE * (DIM + 2)) + 2 * PAGE * DIM
    return first.to(tl.pointer_type(tl.float16)) + token


@triton.jit
def numbers(x, query):
    """Return what a tile of K or V multiplies: numbers of 8 bits in the queries' type, which holds them exactly."""
    return x.to(tl.float32).to(query.dtype) if x.dtype == tl.int8 else x


@triton.jit
def weighed(weights, values, scales, PRECISION: tl.constexpr):
    """Return ``weights @ (values * scales[:, None])`` in fp32; the weights take the scales."""
    if values.dtype == tl.float16:  # Products of weights and scales are often below the normal numbers of fp16.
        top = tl.max(scales, 0)
        top = tl.where(top > 0, top, 1.0)
        result = dot((weights * (scales / top)[None, :]).to(values.dtype), values, PRECISION) * top
    else:
        result = dot((weights * scales[None, :]).to(values.dtype), values, PRECISION)
    return result
