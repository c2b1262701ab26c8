"""Asking the CPU from inside a stream: a number in pinned memory says that a job is there, another that it is done.

Launches like any other, so a captured graph replays them; the number comes from device memory and grows with the step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.triton.common import kernel
from hybrid_backend.kernels.triton.counters import AHEAD, ASKED_AT, WAITED, clock

_BLOCK = 2048  # elements that a program copies


@triton.jit
def raise_flag(flag, value, REAL: tl.constexpr):
    """Store a number to a flag. What earlier kernels of the stream wrote to host memory, and what this thread did, is
    there before the number is."""
    if REAL:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r",
            [flag.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(flag, value)


@triton.jit
def look(flag, REAL: tl.constexpr):
    """The flag's number; what was written before it is seen from here on. For programs of one warp: its threads read
    together, so that all find the same number."""
    if REAL:
        found = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [flag.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        found = tl.load(flag)
    return found


@kernel("q", "box", "elements", "stride")
def _ask_kernel(asked, number, q, box, arrived, listed, counters, lists, elements, stride, WIDTH: tl.constexpr,
                REAL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at, programs = tl.program_id(0), tl.num_programs(0)
    i = at * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    tl.store(box + i, tl.load(q + (i // WIDTH).to(tl.int64) * stride + i % WIDTH, mask=inside), mask=inside)
    tl.debug_barrier()  # all threads have written before one says so
    # Whoever comes last raises the flag, when all of the query is there.
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
    if before == programs - 1:
        tl.store(arrived, 0)
        if counters is not None:
            j, pages = tl.arange(0, BLOCK), tl.zeros([], tl.int32)
            for first in range(0, lists, BLOCK):
                pages += tl.sum(tl.load(listed + first + j, mask=first + j < lists, other=0), 0)
            tl.store(counters + ASKED_AT, tl.where(pages > 0, clock(), 0))
        raise_flag(asked, tl.load(number), REAL)


@kernel()
def _await_kernel(answered, number, timed_out, time_left, counters, STEPS: tl.constexpr, REAL: tl.constexpr):
    wanted = tl.load(number)
    left, needed = tl.load(time_left), clock()
    if counters is not None:
        asked_at = tl.load(counters + ASKED_AT)
        ahead = tl.where(asked_at > 0, needed - asked_at, 0)
        tl.store(counters + AHEAD, tl.load(counters + AHEAD) + ahead)
    reached = look(answered, REAL)
    waited = clock() - needed
    while (reached < wanted) & (waited < left):
        reached = look(answered, REAL)
        waited = clock() - needed
    tl.store(time_left, tl.maximum(left - waited, 0))
    if counters is not None:
        tl.store(counters + WAITED, tl.load(counters + WAITED) + waited)
    if reached < wanted:
        tl.store(timed_out + wanted % STEPS, wanted)


def ask(
    q: Tensor, box: Tensor, asked: Tensor, number: Tensor, arrived: Tensor,
    listed: Tensor | None = None, counters: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy ``q`` to the mailbox, and when it is there store ``number`` to the flag, after all that the stream has
    written before.

    Args:
        q: ``[rows, heads, head_dim]``, any row stride; box: ``[>= rows, heads, head_dim]`` (pinned) of its dtype.
        asked: the flag, int32 (pinned); number: ``[1]`` int32 on the device.
        arrived: ``[1]`` int32 on the device, 0: how many programs have copied their part; 0 again when all have.
        listed: ``[rows, lists]`` int32 on the device, how many pages the CPU is asked for; given with ``counters``.
        counters: ``[COUNTERS]`` int64 of the layer (`operations.Counters`): remembers when pages were asked for.
    """
    real, lists = not triton.knobs.runtime.interpret, 0 if listed is None else listed.numel()
    _ask_kernel[(triton.cdiv(q.numel(), _BLOCK),)](
        asked, number, q, box, arrived, listed, counters, lists, q.numel(), q.stride(0), q[0].numel(), real, _BLOCK,
        num_warps=4,
    )  # fmt: skip


def await_answer(
    answered: Tensor, number: Tensor, timed_out: Tensor, time_left: Tensor, counters: Tensor | None = None
) -> None:
    """Hold the stream until the flag ``answered`` (int32, pinned) has reached ``number`` (``[1]`` int32 on the device).

    Args:
        timed_out: ``[steps]`` int32 (pinned): ``timed_out[number % steps]`` becomes ``number`` if the answer is not
            there when no time is left; the stream then goes on, and nothing that the step computes may be used.
        time_left: ``[1]`` int64 on the device, of the step: nanoseconds. The wait is taken off: all waits of a step
            together are no longer than one may be.
        counters: ``[COUNTERS]`` int64 of the layer (`operations.Counters`): the wait is added, and how far ahead `ask`
            was of it.
    """
    real = not triton.knobs.runtime.interpret
    _await_kernel[(1,)](answered, number, timed_out, time_left, counters, len(timed_out), real, num_warps=1)
