"""Prediction of a query in three launches: norm of the residual stream, PyTorch's projection, norm and rotation.

Kernels accumulate in fp32, and round to the model's dtype where engines round.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.triton.common import kernel

_TILE = 512  # elements of whole heads that a program holds


class RmsNorm(NamedTuple):
    """RMS norm ``x / rms(x) * weight`` over groups of as many elements as there are weights."""

    weight: Tensor
    """``[n]``, any dtype."""
    epsilon: float
    """Number that is added to the mean square."""
    adds_one: bool
    """The weight is ``1 + weight``, as in Gemma."""


class Rotation(NamedTuple):
    """Rotary embedding (RoFormer, arXiv 2104.09864) of each head's first elements; the other elements stay."""

    positions: Tensor
    """``[rows]`` int32 or int64."""
    cos_sin: Tensor
    """``[positions, rotated elements]``, contiguous, any dtype: cosines, then as many sines."""
    is_neox: bool
    """Element i of the first half and of the second half are a pair; otherwise neighbours are."""


@kernel("hidden", "residual", "weight", "out", "hidden_stride", "residual_stride")
def _stream_kernel(hidden, residual, weight, out, epsilon, hidden_stride, residual_stride, WIDTH: tl.constexpr,
                   ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live = i < WIDTH
    kind = out.dtype.element_ty
    x = tl.load(hidden + row * hidden_stride + i, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        x += tl.load(residual + row * residual_stride + i, mask=live, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
    w = tl.load(weight + i, mask=live, other=0.0).to(tl.float32)
    if ADDS_ONE:
        w += 1.0
    x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    tl.store(out + row * WIDTH + i, (x * w).to(kind), mask=live)


def normed_stream(hidden: Tensor, residual: Tensor | None, norm: RmsNorm) -> Tensor:
    """Normalize hidden states, or their sum with the residual, which is rounded first.

    Args:
        hidden: ``[rows, hidden]``, any row stride.
        residual: like ``hidden``; None: there is none.
        norm: RMS norm of the hidden size.

    Returns:
        ``[rows, hidden]`` in the dtype of ``hidden``.
    """
    rows, width = hidden.shape
    assert hidden.stride(1) == 1 and (residual is None or residual.stride(1) == 1) and len(norm.weight) == width
    out = hidden.new_empty(rows, width)
    block = triton.next_power_of_2(width)
    if rows:
        _stream_kernel[(rows,)](
            hidden, residual, norm.weight, out, norm.epsilon, hidden.stride(0),
            0 if residual is None else residual.stride(0), width, norm.adds_one, block,
            num_warps=min(32, max(4, block // 512)),
        )  # fmt: skip
    return out


@triton.jit
def _weighted(x, inverse, weight, index, live, ADDS_ONE: tl.constexpr, KIND: tl.constexpr):
    """Return the norm's rounded output."""
    w = tl.load(weight + index, mask=live, other=0.0).to(tl.float32)
    if ADDS_ONE:
        w += 1.0
    return (x * inverse * w).to(KIND).to(tl.float32)


@kernel("q", "weight", "cos_sin", "out")
def _queries_kernel(q, weight, positions, cos_sin, out, epsilon, HEADS: tl.constexpr, DIM: tl.constexpr,
                    TURNED: tl.constexpr, NEOX: tl.constexpr, ADDS_ONE: tl.constexpr, TOGETHER: tl.constexpr,
                    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    live = (head < HEADS)[:, None] & (d < DIM)[None, :]
    kind = out.dtype.element_ty
    first = row * HEADS * DIM + head * DIM
    x = tl.load(q + first[:, None] + d[None, :], mask=live, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(x * x, 1)
        if TOGETHER:
            squares = squares * 0 + tl.sum(squares, 0) / HEADS
        inverse = tl.rsqrt(squares / DIM + epsilon)[:, None]
        weights = (head * DIM if TOGETHER else head * 0)[:, None]
        x = _weighted(x, inverse, weight, weights + d[None, :], live, ADDS_ONE, kind)
    if TURNED > 0:
        if NEOX:
            is_first, angle = d < TURNED // 2, d % (TURNED // 2)
            partner = tl.where(is_first, d + TURNED // 2, d - TURNED // 2)
        else:
            is_first, angle, partner = d % 2 == 0, d // 2, d ^ 1
        turns = d < TURNED
        paired = live & turns[None, :]
        y = tl.load(q + first[:, None] + partner[None, :], mask=paired, other=0.0).to(tl.float32)
        if weight is not None:
            y = _weighted(y, inverse, weight, weights + partner[None, :], paired, ADDS_ONE, kind)
        table_row = cos_sin + tl.load(positions + row).to(tl.int64) * TURNED + angle
        cos = tl.load(table_row, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(table_row + TURNED // 2, mask=turns, other=0.0).to(tl.float32)
        x = x * cos[None, :] + tl.where(is_first[None, :], -y, y) * sin[None, :]
    tl.store(out + first[:, None] + d[None, :], x.to(kind), mask=live)


def finished_queries(q: Tensor, norm: RmsNorm | None, rotation: Rotation | None) -> Tensor:
    """Normalize and rotate projected queries, as the attention gets them.

    Args:
        q: ``[rows, heads, head_dim]``, contiguous.
        norm: RMS norm of each head (``[head_dim]`` weights) or of all heads together (``[heads * head_dim]``), or None.
        rotation: rotary embedding, or None.

    Returns:
        ``[rows, heads, head_dim]``; ``q`` itself without norm and rotation.
    """
    rows, heads, dim = q.shape
    if not rows or (norm is None and rotation is None):
        return q
    assert norm is None or len(norm.weight) in (dim, heads * dim)
    turned = 0 if rotation is None else rotation.cos_sin.shape[1]
    assert rotation is None or (rotation.cos_sin.is_contiguous() and rotation.cos_sin.dim() == 2 and turned <= dim)
    weight, epsilon, adds_one = norm or (None, 0.0, False)
    positions, cos_sin, is_neox = rotation or (None, None, False)
    together = weight is not None and len(weight) != dim
    block_d, all_heads = triton.next_power_of_2(dim), triton.next_power_of_2(heads)
    block_h = all_heads if together else min(all_heads, max(1, _TILE // block_d))
    out = q.new_empty(rows, heads, dim)
    _queries_kernel[(rows, triton.cdiv(heads, block_h))](
        q, weight, positions, cos_sin, out, epsilon, heads, dim, turned, is_neox, adds_one, together, block_h, block_d,
        num_warps=min(32, max(4, block_h * block_d // 512)),
    )  # fmt: skip
    return out
