"""Questions to the CPU that are answered some steps later: one at a time of each request, about any layer.

Asked and taken by kernels in the stream, so that a captured graph replays them: the numbers of the questions lie on the
device, whatever must be known of a row is read there, and nobody waits unless told to.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.cpu.mailbox import RequestBoxes
from hybrid_backend.kernels.triton.common import kernel
from hybrid_backend.kernels.triton.counters import clock
from hybrid_backend.kernels.triton.signal import look, raise_flag

_MOST = 2048  # numbers that a program's one warp moves at a time


@kernel("box_q", "q")
def _ask_rows_kernel(box_q, box_ids, box_counts, box_layer, asked, q, table, listed, requests, wanted, position,
                     numbers, table_stride, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, LINE: tl.constexpr,
                     REAL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + row) != 0:
        request, i = tl.load(requests + row).to(tl.int64), tl.arange(0, BLOCK)
        for first in range(0, WIDTH, BLOCK):
            mask = first + i < WIDTH
            value = tl.load(q + row * WIDTH + first + i, mask=mask)
            tl.store(box_q + request * WIDTH + first + i, value.to(box_q.dtype.element_ty), mask=mask)
        pages = tl.load(listed + row)
        for first in range(0, tl.minimum(pages, CAPACITY), BLOCK):
            mask = first + i < tl.minimum(pages, CAPACITY)
            page = tl.load(table + row * table_stride + first + i, mask=mask)
            tl.store(box_ids + request * CAPACITY + first + i, page, mask=mask)
        tl.store(box_counts + request, pages)  # more than there is room for: the workers refuse it
        tl.store(box_layer + request, position)
        number = tl.load(numbers + request) + 1
        tl.debug_barrier()  # all threads have written, and read the number, before any goes on
        tl.store(numbers + request, number)
        raise_flag(asked + request * LINE, number, REAL)


@kernel("box_out", "out")
def _take_rows_kernel(box_out, box_lse, answered, failed, requests, wanted, numbers, out, lse, ready, waited,
                      time_left, STEPS: tl.constexpr, WAIT: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
                      LINE: tl.constexpr, REAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request, is_there = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
    if tl.load(wanted + row) != 0:
        request = tl.load(requests + row).to(tl.int64)
        number, flag = tl.load(numbers + request), answered + request * LINE
        reached = look(flag, REAL)
        if WAIT:
            left, needed, passed = tl.load(time_left + row), clock(), tl.zeros([], tl.int64)
            while (reached != number) & (passed < left):
                reached = look(flag, REAL)
                passed = clock() - needed
            tl.store(time_left + row, tl.maximum(left - passed, 0))
            tl.store(waited + row, tl.load(waited + row) + passed)
        is_there = (reached == number).to(tl.int32)
        if is_there:
            last = tl.load(failed + request * STEPS + (number & (STEPS - 1)))
            is_there = tl.where(last == number, -1, 1)
    tl.store(ready + row, is_there)
    i, h = tl.arange(0, BLOCK), tl.arange(0, BLOCK_H)
    for first in range(0, WIDTH, BLOCK):
        mask = first + i < WIDTH
        value = tl.load(box_out + request * WIDTH + first + i, mask=first + i < WIDTH * is_there, other=0.0)
        tl.store(out + row * WIDTH + first + i, value, mask=mask)
    value = tl.load(box_lse + request * HEADS + h, mask=h < HEADS * is_there, other=float("-inf"))
    tl.store(lse + row * HEADS + h, value, mask=h < HEADS)


def _block(width: int) -> int:
    return min(_MOST, int(triton.next_power_of_2(width)))


def ask_rows(
    boxes: RequestBoxes,
    q: Tensor,
    table: Tensor,
    listed: Tensor,
    requests: Tensor,
    wanted: Tensor,
    position: int,
    numbers: Tensor,
) -> None:
    """Ask for the attention of some rows over whole pages; a request's earlier question is void from then on.

    All tensors but those of ``boxes`` are on the device.

    Args:
        q: ``[rows, heads, head_dim]``, contiguous.
        table: ``[rows, pages]`` int32 host pages, rows of any stride.
        listed: ``[rows]`` int32: the first so many of the row's pages are asked for. More than the box has room for
            make a question that cannot be computed.
        requests: ``[rows]`` int32, all different where wanted: whose box.
        wanted: ``[rows]`` int32, 0: the row asks nothing.
        position: of the layer (`QuestionBoxes.position`).
        numbers: ``[requests]`` int32, of the last question of each request; goes up by 1 where a row asks.
    """
    if len(q):
        _ask_rows_kernel[(len(q),)](
            boxes.q, boxes.ids, boxes.counts, boxes.layer, boxes.asked, q, table, listed, requests, wanted, position,
            numbers, table.stride(0), boxes.ids.shape[1], q.shape[1] * q.shape[2], boxes.asked.shape[1],
            not triton.knobs.runtime.interpret, _block(q.shape[1] * q.shape[2]), num_warps=1,
        )  # fmt: skip


def take_rows(
    boxes: RequestBoxes,
    requests: Tensor,
    wanted: Tensor,
    numbers: Tensor,
    out: Tensor,
    lse: Tensor,
    ready: Tensor,
    waited: Tensor,
    time_left: Tensor,
    wait: bool,
) -> None:
    """Take the answers to the last questions of some rows, as far as they are there.

    A question that could not be computed has an answer too, the empty partial. All tensors but those of ``boxes`` are
    on the device.

    Args:
        requests: ``[rows]`` int32: whose box.
        wanted: ``[rows]`` int32, 0: nothing is taken; of a wanted row the request has asked (`ask_rows`).
        numbers: ``[requests]`` int32, as `ask_rows` left them.
        out: ``[rows, heads, head_dim]`` fp32: becomes the answer, or 0 where none is taken.
        lse: ``[rows, heads]`` fp32: likewise, or -inf.
        ready: ``[rows]`` int32: becomes 1 where an answer was taken, -1 where the question could not be computed
            (`QuestionBoxes.failure`), else 0.
        waited: ``[rows]`` int64 nanoseconds: the wait is added.
        time_left: ``[rows]`` int64 nanoseconds: the wait is taken off; a row waits no longer.
        wait: hold the stream until the answers are there or the time is used up.
    """
    rows, heads, dim = out.shape
    if rows:
        _take_rows_kernel[(rows,)](
            boxes.out, boxes.lse, boxes.answered, boxes.failed, requests, wanted, numbers, out, lse, ready, waited,
            time_left, boxes.failed.shape[1], wait, heads * dim, heads, boxes.answered.shape[1],
            not triton.knobs.runtime.interpret, _block(heads * dim), triton.next_power_of_2(heads), num_warps=1,
        )  # fmt: skip
