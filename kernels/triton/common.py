"""Functions and constants that several kernels share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels import byte_digests
from hybrid_backend.kernels.digest_format import MINMAX_INT8, digest_format_of
from hybrid_backend.kernels.operations import Reuse

COPY_PROGRAMS = 12
"""Programs of a copy at most, since they take processors from the step while they wait for the bus.

With 8 KiB in flight each they saturate a bus of 50 GB/s whose reads take 1.5 us. vLLM measured the same number on an
H100 (v1/kv_offload/cpu/swap_blocks_triton.py).
"""


def constants(function: Callable[..., None]) -> set[str]:
    """Return the names of a kernel's ``constexpr`` arguments."""
    arguments = inspect.signature(function).parameters
    return {name for name, argument in arguments.items() if "constexpr" in str(argument.annotation)}


def kernel(*wide: str) -> Callable[[Callable[..., None]], Any]:
    """Decorate a kernel like ``triton.jit``, so that it is compiled once for a model's shape and a configuration.

    Triton specializes kernels by default: it compiles a kernel again for each combination of aligned and unaligned
    pointers, and of numbers that are 1 or divisible by 16. Slices by layer or by batch vary in alignment. A compilation
    takes seconds on the host of an H200, and some of them came while requests waited.

    Args:
        wide: the only arguments to specialize: pointers to rows of at least 16 bytes, and the strides of such rows.
            Their alignment decides how much a thread loads at once.
    """

    def compiled(function: Callable[..., None]) -> Any:
        arguments = inspect.signature(function).parameters
        assert arguments.keys() >= set(wide), f"{function.__name__} has not all of {wide}"
        specialized = constants(function).union(wide)
        return triton.jit(function, do_not_specialize=[name for name in arguments if name not in specialized])

    return compiled


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return ``a @ b`` in fp32; ``PRECISION`` comes from `precision_of`."""
    if PRECISION == "widen":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision of products of a dtype: no TF32 for fp32, which is used where exactness counts.

    Triton's interpreter cannot multiply bf16, which it keeps as integers, so bf16 is widened there.
    """
    if dtype == torch.float32:
        return "ieee"
    return "widen" if triton.knobs.runtime.interpret and dtype == torch.bfloat16 else "tf32"


def group_block(group: int) -> int:
    """Return the rows of a tile of ``group`` query heads: at least 16, which tensor cores need."""
    return max(16, int(triton.next_power_of_2(group)))


def byte_tail(digests: Tensor | None, dim: int) -> int:
    """Return the bytes after the channels in a row of byte digests; 0 for digests in another format."""
    return byte_digests.TAIL if digests is not None and digest_format_of(digests, dim) is MINMAX_INT8 else 0


@triton.jit
def reuses(epochs, list_epochs, row, lists, pages):
    """Tell whether a row of ``pages`` pages reuses its selection (`operations.Reuse`); ``epochs`` None: no row does."""
    result = False
    if epochs is not None:
        # All lists of a row have the same epoch.
        result = (pages > 0) & (tl.load(epochs + row) == tl.load(list_epochs + row * lists))
    return result


def reuse_pointers(reuse: Reuse | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the epochs of the rows and of their lists for `reuses`."""
    return (None, None) if reuse is None else (reuse.epochs, reuse.list_epochs)


@triton.jit
def rounded(x):
    """Round to the nearest whole number, ties to even: above 2^23, fp32 has whole numbers only."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def inverse(x):
    """Return ``1 / x``, or 0 where that would overflow."""
    return tl.where(x > 1e-37, 1.0 / tl.where(x > 1e-37, x, 1.0), 0.0)


@triton.jit
def ordered(x):
    """Convert fp32 to int64 of the same order; NaN is the lowest value, and the zeros are equal."""
    number = tl.where(x == x, x, float("-inf"))
    bits = tl.where(number == 0, 0.0, number).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
