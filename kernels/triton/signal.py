"""Asking the CPU from inside a stream: a number in pinned memory says that a job is there, another that it is done.

Launches like any other, so a captured graph replays them; the number comes from device memory and grows with the step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from hybrid_backend.kernels.triton.tally import AHEAD, ASKED_AT, WAITED, clock

_BLOCK = 256


@triton.jit(do_not_specialize=["lists"])
def _ask_kernel(asked, number, listed, tally, lists, REAL: tl.constexpr, BLOCK: tl.constexpr):
    value = tl.load(number)
    if tally is not None:
        i, pages = tl.arange(0, BLOCK), tl.zeros([], tl.int32)
        for first in range(0, lists, BLOCK):
            pages += tl.sum(tl.load(listed + first + i, mask=first + i < lists, other=0), 0)
        tl.store(tally + ASKED_AT, tl.where(pages > 0, clock(), 0))
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
def _await_kernel(answered, number, late, patience, tally, STEPS: tl.constexpr, REAL: tl.constexpr):
    wanted = tl.load(number)
    left = tl.load(patience)
    if tally is not None:
        needed, asked_at = clock(), tl.load(tally + ASKED_AT)
        ahead = tl.where(asked_at > 0, needed - asked_at, 0)
        tl.store(tally + AHEAD, tl.load(tally + AHEAD) + ahead)
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
    if tally is not None:
        tl.store(tally + WAITED, tl.load(tally + WAITED) + (clock() - needed))
    if seen < wanted:
        tl.store(late + wanted % STEPS, wanted)


def ask(asked: Tensor, number: Tensor, listed: Tensor | None = None, tally: Tensor | None = None) -> None:
    """Store ``number`` (``[1]`` int32 on the device) to the flag ``asked`` (int32, pinned), after all that the stream
    has written.

    Args:
        listed: ``[rows, lists]`` int32 on the device, how many pages the CPU is asked for; given with ``tally``.
        tally: ``[COLUMNS]`` int64 of the layer, see `tally`: remembers when pages were asked for.
    """
    real = not triton.knobs.runtime.interpret
    _ask_kernel[(1,)](asked, number, listed, tally, 0 if listed is None else listed.numel(), real, _BLOCK, num_warps=1)


def await_answer(answered: Tensor, number: Tensor, late: Tensor, patience: Tensor, tally: Tensor | None = None) -> None:
    """Hold the stream until the flag ``answered`` (int32, pinned) has reached ``number`` (``[1]`` int32 on the device).

    Args:
        late: ``[steps]`` int32 (pinned): ``late[number % steps]`` becomes ``number`` if the answer is not there when
            the patience is at an end; the stream then goes on, and nothing that the step computes may be used.
        patience: ``[1]`` int64 on the device, what is left of the step's: nanoseconds (under Triton's interpreter:
            looks at the flag). The wait is taken off: all waits of a step together are no longer than one may be.
        tally: ``[COLUMNS]`` int64 of the layer, see `tally`: the wait is added, and how far ahead `ask` was of it.
    """
    real = not triton.knobs.runtime.interpret
    _await_kernel[(1,)](answered, number, late, patience, tally, len(late), real, num_warps=1)
