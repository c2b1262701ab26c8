"""What several kernels need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels import byte_digests
from hybrid_backend.kernels.operations import digest_kind

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


def byte_tail(digests: Tensor | None, dim: int) -> int:
    """Of digests in bytes: what a row has after its channels; else 0."""
    return byte_digests.TAIL if digests is not None and digest_kind(digests, dim) == "bytes" else 0


@triton.jit
def rounded(x):
    """To the nearest whole number, of ties to the even one: beyond 2^23 fp32 has no others."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def inverse(x):
    return tl.where(x > 1e-37, 1.0 / tl.where(x > 1e-37, x, 1.0), 0.0)


@triton.jit
def ordered(x):
    """fp32 -> int64 in the same order; NaN counts as the lowest, and the zeros are equal."""
    number = tl.where(x == x, x, float("-inf"))
    bits = tl.where(number == 0, 0.0, number).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
