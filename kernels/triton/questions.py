"""Questions to the CPU that are answered some steps later: one at a time for each request, about any layer.

Kernels in the stream ask the questions and take the answers, so that a captured graph replays them. The numbers of the
questions and all values that vary by row lie on the device. The stream waits for answers only on demand.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.cpu.mailbox import RequestBoxes
from hybrid_backend.kernels.triton.common import kernel
from hybrid_backend.kernels.triton.counters import clock
from hybrid_backend.kernels.triton.signal import look, raise_flag

_MOST = 2048  # numbers that a program's one warp moves at once


@kernel("box_q", "q")
def _ask_rows_kernel(box_q, box_ids, box_counts, box_layer, asked_flags, q, table, listed, requests, row_mask, position,
                     numbers, table_stride, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, LINE: tl.constexpr,
                     REAL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(row_mask + row) != 0:
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
        tl.store(box_counts + request, pages)  # The workers refuse a count above the mailbox's capacity.
        tl.store(box_layer + request, position)
        number = tl.load(numbers + request) + 1
        tl.debug_barrier()  # All threads must have read the number before one overwrites it.
        tl.store(numbers + request, number)
        raise_flag(asked_flags + request * LINE, number, REAL)


@kernel("box_out", "out")
def _take_rows_kernel(box_out, box_lse, answered, failed, requests, row_mask, numbers, out, lse, ready, waited,
                      time_left, STEPS: tl.constexpr, WAIT: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
                      LINE: tl.constexpr, REAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request, is_there = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
    if tl.load(row_mask + row) != 0:
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
    """Return the number of elements that a program moves at once, for rows of ``width`` elements."""
    return min(_MOST, int(triton.next_power_of_2(width)))


def ask_rows(
    boxes: RequestBoxes,
    q: Tensor,
    table: Tensor,
    listed: Tensor,
    requests: Tensor,
    row_mask: Tensor,
    position: int,
    numbers: Tensor,
) -> None:
    """Ask for the attention of some rows over whole pages; a request's earlier question is void from then on.

    All tensors but those of ``boxes`` are on the device.

    Args:
        boxes: boxes of all requests.
        q: queries ``[rows, heads, head_dim]``, contiguous.
        table: ``[rows, pages]`` int32 host pages, any row stride.
        listed: ``[rows]`` int32: number of the row's first pages to attend. A question with more pages than the box has
            room for fails.
        requests: ``[rows]`` int32: index of each row's request, distinct where ``row_mask`` is not 0.
        row_mask: ``[rows]`` int32; 0: the row asks nothing.
        position: position of the layer (`QuestionBoxes.position`).
        numbers: ``[requests]`` int32: number of each request's last question, incremented where a row asks.
    """
    if len(q):
        _ask_rows_kernel[(len(q),)](
            boxes.q, boxes.ids, boxes.counts, boxes.layer, boxes.asked_flag, q, table, listed, requests, row_mask,
            position, numbers, table.stride(0), boxes.ids.shape[1], q.shape[1] * q.shape[2], boxes.asked_flag.shape[1],
            not triton.knobs.runtime.interpret, _block(q.shape[1] * q.shape[2]), num_warps=1,
        )  # fmt: skip


def take_rows(
    boxes: RequestBoxes,
    requests: Tensor,
    row_mask: Tensor,
    numbers: Tensor,
    out: Tensor,
    lse: Tensor,
    ready: Tensor,
    waited: Tensor,
    time_left: Tensor,
    wait: bool,
) -> None:
    """Take the answers to the last questions of some rows, as far as they have arrived.

    A question that failed has an answer too, the empty partial. All tensors but those of ``boxes`` are on the device.

    Args:
        boxes: boxes of all requests.
        requests: ``[rows]`` int32: index of each row's request.
        row_mask: ``[rows]`` int32; 0: nothing is taken. Otherwise the request has asked (`ask_rows`).
        numbers: ``[requests]`` int32, as `ask_rows` left them.
        out: ``[rows, heads, head_dim]`` fp32: takes the answer, or 0 where none is taken.
        lse: ``[rows, heads]`` fp32: takes the answer, or -inf where none is taken.
        ready: ``[rows]`` int32: becomes 1 where an answer was taken, -1 where the question failed
            (`QuestionBoxes.failure`), else 0.
        waited: ``[rows]`` int64 nanoseconds, to which the wait is added.
        time_left: ``[rows]`` int64 nanoseconds, from which the wait is subtracted; a row waits no longer.
        wait: hold the stream until the answers arrive or the time is used up.
    """
    rows, heads, dim = out.shape
    if rows:
        _take_rows_kernel[(rows,)](
            boxes.out, boxes.lse, boxes.answered, boxes.failed, requests, row_mask, numbers, out, lse, ready, waited,
            time_left, boxes.failed.shape[1], wait, heads * dim, heads, boxes.answered.shape[1],
            not triton.knobs.runtime.interpret, _block(heads * dim), triton.next_power_of_2(heads), num_warps=1,
        )  # fmt: skip
