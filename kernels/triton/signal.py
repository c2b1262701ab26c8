"""Flags between a GPU's stream and the CPU workers: numbers in pinned memory announce jobs and their answers.

Numbers in device memory do the same between two streams of the GPU, where an event would not do: a captured graph
cannot wait for work that a step launched outside of the graph.

The kernels are ordinary launches, so a captured graph replays them. The numbers come from device memory and grow by
step.
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
    """Store a number to a flag, after the writes to host memory of earlier kernels in the stream and of this thread."""
    if REAL:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r",
            [flag.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(flag, value)


@triton.jit
def look(flag, REAL: tl.constexpr):
    """Return the flag's number. Everything that was written before the number is visible afterwards.

    For programs of one warp only: its threads read together, so that all of them get the same number.
    """
    if REAL:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [flag.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        value = tl.load(flag)
    return value


@triton.jit
def look_near(number, REAL: tl.constexpr):
    """Return a number that another stream of the same GPU writes (`arrive`), for programs of any number of warps.

    Each thread reads for itself, and sees everything that was written before the number. Threads of different warps may
    read different numbers.
    """
    if REAL:
        value = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [number.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        value = tl.load(number)
    return value


@triton.jit
def await_pages(expected, arrived, number, late, time_left, requests, row, indices, STEPS: tl.constexpr,
                REAL: tl.constexpr):  # fmt: skip
    """Wait until the pages of a row are in the frames of a layer (`operations.AwaitedPages`); no ``expected``: go on.

    ``indices`` is the number of request indices.
    """
    if expected is not None:
        request = tl.load(requests + row)
        copy, reached = tl.load(expected + request), look_near(arrived, REAL)
        if reached < copy:
            left, began, waited = tl.load(time_left), clock(), tl.full([], 0, tl.int64)
            while (reached < copy) & (waited < left):
                reached = look_near(arrived, REAL)
                waited = clock() - began
            tl.store(time_left, tl.maximum(left - waited, 0))
            if reached < copy:
                # Each thread stores for itself: a plain store is left to the first warp, which may have read on.
                step = tl.load(number)
                raise_flag(late + step % STEPS * indices + request, step, REAL)


@kernel()
def _arrive_kernel(arrived, number, REAL: tl.constexpr):
    raise_flag(arrived, number, REAL)


@kernel("q", "box", "elements", "stride")
def _ask_kernel(asked_flag, number, q, box, arrived, listed, counters, lists, elements, stride, WIDTH: tl.constexpr,
                REAL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    tl.store(box + i, tl.load(q + (i // WIDTH).to(tl.int64) * stride + i % WIDTH, mask=inside), mask=inside)
    tl.debug_barrier()  # All threads must have written the query before the program adds itself to `arrived`.
    # The last program raises the flag, when the whole query is written.
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
    if before == programs - 1:
        tl.store(arrived, 0)
        if counters is not None:
            j, pages = tl.arange(0, BLOCK), tl.zeros([], tl.int32)
            for first in range(0, lists, BLOCK):
                pages += tl.sum(tl.load(listed + first + j, mask=first + j < lists, other=0), 0)
            tl.store(counters + ASKED_AT, tl.where(pages > 0, clock(), 0))
        raise_flag(asked_flag, tl.load(number), REAL)


@kernel()
def _await_kernel(answered, number, timed_out, time_left, counters, STEPS: tl.constexpr, REAL: tl.constexpr):
    expected = tl.load(number)
    left, needed = tl.load(time_left), clock()
    if counters is not None:
        asked_at = tl.load(counters + ASKED_AT)
        ahead = tl.where(asked_at > 0, needed - asked_at, 0)
        tl.store(counters + AHEAD, tl.load(counters + AHEAD) + ahead)
    reached = look(answered, REAL)
    waited = clock() - needed
    while (reached < expected) & (waited < left):
        reached = look(answered, REAL)
        waited = clock() - needed
    tl.store(time_left, tl.maximum(left - waited, 0))
    if counters is not None:
        tl.store(counters + WAITED, tl.load(counters + WAITED) + waited)
    if reached < expected:
        tl.store(timed_out + expected % STEPS, expected)


def ask(
    q: Tensor, box: Tensor, asked_flag: Tensor, number: Tensor, arrived: Tensor,
    listed: Tensor | None = None, counters: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy ``q`` to the mailbox, then store ``number`` to the flag, after all earlier writes of the stream.

    Args:
        q: queries ``[rows, heads, head_dim]``, any row stride.
        box: ``[>= rows, heads, head_dim]``, pinned, of the dtype of ``q``.
        asked_flag: int32, pinned.
        number: ``[1]`` int32 on the device.
        arrived: ``[1]`` int32 on the device: programs that have copied their part; 0 before and after.
        listed: ``[rows, lists]`` int32 on the device: pages that the CPU is asked for; given with ``counters``.
        counters: counters of the layer (`operations.Counters`), which take the time of the question.
    """
    real, lists = not triton.knobs.runtime.interpret, 0 if listed is None else listed.numel()
    _ask_kernel[(triton.cdiv(q.numel(), _BLOCK),)](
        asked_flag, number, q, box, arrived, listed, counters, lists, q.numel(), q.stride(0), q[0].numel(), real,
        _BLOCK, num_warps=4,
    )  # fmt: skip


def await_answer(
    answered: Tensor, number: Tensor, timed_out: Tensor, time_left: Tensor, counters: Tensor | None = None
) -> None:
    """Hold the stream until the flag has reached ``number``, or no time is left.

    Args:
        answered: flag, int32, pinned.
        number: ``[1]`` int32 on the device.
        timed_out: ``[steps]`` int32, pinned: ``timed_out[number % steps]`` becomes ``number`` if no time is left. The
            stream then goes on, and no result of the step may be used.
        time_left: ``[1]`` int64 nanoseconds on the device, from which the wait is subtracted. So all waits of a step
            together are bounded.
        counters: counters of the layer (`operations.Counters`), to which the wait and the time since `ask` are added.
    """
    real = not triton.knobs.runtime.interpret
    _await_kernel[(1,)](answered, number, timed_out, time_left, counters, len(timed_out), real, num_warps=1)


def arrive(arrived: Tensor, number: int) -> None:
    """Store the number of a copy to ``arrived`` when all earlier work of the stream is done.

    Args:
        arrived: ``[1]`` int32 on the device (`operations.AwaitedPages`).
        number: number of the copy.
    """
    _arrive_kernel[(1,)](arrived, number, not triton.knobs.runtime.interpret, num_warps=1)
