"""What several kernels need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COPY_PROGRAMS = 12
"""Of a copy, at most: they wait for the bus and take their processors from the step. With 8 KiB in flight of each they
keep a bus of 50 GB/s busy whose reads take 1.5 us; vLLM measured the same number on an H100
(v1/kv_offload/cpu/swap_blocks_triton.py)."""


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """``a @ b`` in fp32; ``PRECISION`` from `precision_of`."""
    if PRECISION == "widen":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


def precision_of(dtype: torch.dtype) -> str:
    """fp32 inputs are for exactness: no TF32. Triton's interpreter cannot multiply bf16 (it keeps it as integers)."""
    if dtype == torch.float32:
        return "ieee"
    return "widen" if triton.knobs.runtime.interpret and dtype == torch.bfloat16 else "tf32"


def group_block(group: int) -> int:
    """Rows of a tile of query heads: tensor cores take 16."""
    return max(16, int(triton.next_power_of_2(group)))


@triton.jit
def ordered(x):
    """fp32 -> int64 in the same order; NaN counts as the lowest, and the zeros are equal."""
    number = tl.where(x == x, x, float("-inf"))
    bits = tl.where(number == 0, 0.0, number).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
