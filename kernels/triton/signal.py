"""Asking the CPU from inside a stream: a number in pinned memory says that a job is there, another that it is done.

Launches like any other, so a captured graph replays them; the number comes from device memory and grows with the step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


@triton.jit
def _ask_kernel(asked, number, REAL: tl.constexpr):
    value = tl.load(number)
    if REAL:
        # What earlier kernels of the stream wrote to host memory is there before this number is.
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r",
            [asked.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(asked, value)


@triton.jit
def _look(flag, REAL: tl.constexpr):
    if REAL:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [flag.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        seen = tl.load(flag)
    return seen


@triton.jit
def _await_kernel(answered, number, late, patience, STEPS: tl.constexpr, REAL: tl.constexpr):
    wanted = tl.load(number)
    left = tl.load(patience)
    seen = _look(answered, REAL)
    if REAL:
        began = cuda.globaltimer()
        waited = began - began
        while (seen < wanted) & (waited < left):
            seen = _look(answered, REAL)
            waited = cuda.globaltimer() - began
        tl.store(patience, tl.maximum(left - waited, 0))
    else:
        looks = 0
        while (seen < wanted) & (looks < left):
            seen = _look(answered, REAL)
            looks += 1
        tl.store(patience, left - looks)
    if seen < wanted:
        tl.store(late + wanted % STEPS, wanted)


def ask(asked: Tensor, number: Tensor) -> None:
    """Store ``number`` (``[1]`` int32 on the device) to the flag ``asked`` (int32, pinned), after all that the stream
    has written."""
    _ask_kernel[(1,)](asked, number, not triton.knobs.runtime.interpret, num_warps=1)


def await_answer(answered: Tensor, number: Tensor, late: Tensor, patience: Tensor) -> None:
    """Hold the stream until the flag ``answered`` (int32, pinned) has reached ``number`` (``[1]`` int32 on the device).

    Args:
        late: ``[steps]`` int32 (pinned): ``late[number % steps]`` becomes ``number`` if the answer is not there when
            the patience is at an end; the stream then goes on, and nothing that the step computes may be used.
        patience: ``[1]`` int64 on the device, what is left of the step's: nanoseconds (under Triton's interpreter:
            looks at the flag). The wait is taken off: all waits of a step together are no longer than one may be.
    """
    _await_kernel[(1,)](answered, number, late, patience, len(late), not triton.knobs.runtime.interpret, num_warps=1)
