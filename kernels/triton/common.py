"""What several kernels need."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

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


def constants(function: Callable[..., None]) -> set[str]:
    """Arguments of a kernel that it is compiled for, value by value."""
    arguments = inspect.signature(function).parameters
    return {name for name, each in arguments.items() if "constexpr" in str(each.annotation)}


def kernel(*wide: str) -> Callable[[Callable[..., None]], Any]:
    """``triton.jit``, so that a kernel is compiled once for a model's shape and a configuration.

    Args:
        wide: pointers to rows of 16 bytes and more, and what such rows lie apart: whether these are divisible by 16
            tells Triton how much a thread may load at once. Of all else nothing is told. Left to itself, Triton
            compiles a kernel again for every combination of pointers that are aligned and that are not, as slices by
            layer or by batch are, and of numbers that are 1 or divisible by 16: seconds each on the host of an H200,
            some of them while requests waited.
    """

    def compiled(function: Callable[..., None]) -> Any:
        arguments = inspect.signature(function).parameters
        assert arguments.keys() >= set(wide), f"{function.__name__} has not all of {wide}"
        known = constants(function).union(wide)
        return triton.jit(function, do_not_specialize=[name for name in arguments if name not in known])

    return compiled


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
