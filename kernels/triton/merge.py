"""The exact merge of partials: parts of the device's list, and the CPU's part, read from pinned memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(out, lse, cpu_out, cpu_lse, merged, merged_lse, splits, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK_S: tl.constexpr, HAS_CPU: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)  # a row's head
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    live = d < DIM
    parts = tl.load(lse + at * splits + s, mask=s < splits, other=float("-inf"))
    highest = tl.max(parts, 0)
    if HAS_CPU:
        of_cpu = tl.load(cpu_lse + at)
        highest = tl.maximum(highest, of_cpu)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing anywhere: out 0, lse -inf, no NaN
    weights = tl.exp(parts - base)
    total = tl.sum(weights, 0)
    values = tl.load(out + (at * splits + s)[:, None] * DIM + d[None, :],
                     mask=(s < splits)[:, None] & live[None, :], other=0.0)  # fmt: skip
    result = tl.sum(weights[:, None] * values, 0)
    if HAS_CPU:
        weight = tl.exp(of_cpu - base)
        total += weight
        result += weight * tl.load(cpu_out + at * DIM + d, mask=live, other=0.0)
    some = total > 0
    result = tl.where(some, result / tl.where(some, total, 1.0), 0.0)
    tl.store(merged + at * DIM + d, result.to(merged.dtype.element_ty), mask=live)
    tl.store(merged_lse + at, tl.where(some, base + tl.log(tl.where(some, total, 1.0)), float("-inf")))


def merge_partials(
    out: Tensor, lse: Tensor, cpu: tuple[Tensor, Tensor] | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the union of disjoint sets of keys (FlashAttention-2, section 2.2).

    Args:
        out: ``[rows, heads, splits, head_dim]`` fp32; ``lse``: ``[rows, heads, splits]`` fp32, natural log.
        cpu: ``([rows, heads, head_dim], [rows, heads])`` fp32, pinned or on the device.
        dtype: of the result.

    Returns:
        ``([rows, heads, head_dim], [rows, heads] fp32)``. Empty partials change nothing; nothing but empty ones gives
        out 0, lse -inf.
    """
    rows, heads, splits, dim = out.shape
    merged = (out.new_empty(rows, heads, dim, dtype=dtype), out.new_empty(rows, heads))
    if rows:
        _merge_kernel[(rows * heads,)](
            out, lse, *(cpu or (None, None)), *merged, splits,
            dim, triton.next_power_of_2(dim), triton.next_power_of_2(splits), cpu is not None,
        )  # fmt: skip
    return merged
