"""Questions to the CPU that are answered some steps later: one at a time for each request, about any layer.

Kernels in the stream ask the questions and take the answers, so that a captured graph replays them. The numbers of the
questions and all values that vary by row lie on the device. The stream waits for answers only on demand.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.cpu.mailbox import RequestBoxes
from hybrid_backend.kernels.operations import FAILED, NOWHERE, RowStates
from hybrid_backend.kernels.triton.common import kernel
from hybrid_backend.kernels.triton.counters import WAITED, clock
from hybrid_backend.kernels.triton.signal import look, raise_flag

_MOST = 2048  # numbers that a program moves at once
_ROWS = 256  # rows that a program reads at once
_NOWHERE, _FAILED = tl.constexpr(NOWHERE), tl.constexpr(FAILED)


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
def _take_rows_kernel(box_out, box_lse, answered, failed, requests, on_cpu, parks, parked, live, asks, stored, tail,
                      growing, counts, pages, numbers, out, lse, waited, time_left, arrived, counters, layer,
                      count_stride, STEPS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, LINE: tl.constexpr,
                      REAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
                      BLOCK_R: tl.constexpr):  # fmt: skip
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    place, is_asking, may_park = tl.load(parked + row), tl.load(asks + row) != 0, tl.load(parks + row) != 0
    is_on_cpu, was_live, page = tl.load(on_cpu + row), tl.load(live + row), tl.load(pages + row)
    takes = (is_asking & (may_park == 0)) | (place == layer)
    request, is_there, passed = tl.zeros([], tl.int64), tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    if takes:
        request = tl.load(requests + row).to(tl.int64)
        number, flag = tl.load(numbers + request), answered + request * LINE
        reached = look(flag, REAL)
        if may_park == 0:
            left, needed = tl.load(time_left + row), clock()
            while (reached != number) & (passed < left):
                reached = look(flag, REAL)
                passed = clock() - needed
            tl.store(time_left + row, tl.maximum(left - passed, 0))
        is_there = (reached == number).to(tl.int32)
        if is_there:
            last = tl.load(failed + request * STEPS + (number & (STEPS - 1)))
            is_there = tl.where(last == number, -1, 1)
    i, h = tl.arange(0, BLOCK), tl.arange(0, BLOCK_H)
    for first in range(0, WIDTH, BLOCK):
        mask = first + i < WIDTH
        value = tl.load(box_out + request * WIDTH + first + i, mask=first + i < WIDTH * is_there, other=0.0)
        tl.store(out + row * WIDTH + first + i, value, mask=mask)
    value = tl.load(box_lse + request * HEADS + h, mask=h < HEADS * is_there, other=float("-inf"))
    tl.store(lse + row * HEADS + h, value, mask=h < HEADS)

    ready = is_there == 1
    stays = tl.where(is_asking & may_park, layer, tl.where(is_there == -1, _FAILED, place))
    is_live = tl.where(is_on_cpu != 0, ready.to(tl.int32), was_live)
    tl.store(waited + row, passed)
    tl.debug_barrier()  # All threads must have read the row's state before one overwrites it.
    tl.store(parked + row, tl.where(ready, _NOWHERE, stays))
    tl.store(live + row, is_live)
    tl.store(asks + row, is_on_cpu * is_live)
    tl.store(stored + row, tl.where(is_live != 0, page, -1))
    tl.store(growing + row, tl.where(ready, tl.load(tail + row), 0))
    c = tl.arange(0, 4)  # Pages and tokens are the first four counters.
    tl.atomic_add(counters + c, tl.load(counts + c * count_stride + row), mask=c < tl.where(ready, 4, 0), sem="relaxed")
    # Rows wait side by side, so the layer waits as long as its slowest row.
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    if before == rows - 1:
        tl.store(arrived, 0)
        longest, r = tl.zeros([], tl.int64), tl.arange(0, BLOCK_R)
        for first in range(0, rows, BLOCK_R):
            values = tl.load(waited + first + r, mask=first + r < rows, other=0, cache_modifier=".cg")
            longest = tl.maximum(longest, tl.max(values, 0))
        tl.atomic_add(counters + WAITED, longest, sem="relaxed")


@kernel("hidden", "residual", "saved", "hidden_stride", "residual_stride", "width")
def _move_kernel(hidden, residual, tokens, slots, saved, parked, live, parks, layer, width, hidden_stride,
                 residual_stride, BLOCK: tl.constexpr):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    restores, saves = tl.load(parked + row) == layer, (tl.load(live + row) * tl.load(parks + row)) != 0
    if restores | saves:
        token, slot = row, saved + tl.load(slots + row) * 2 * width + i
        if tokens is not None:
            token = tl.load(tokens + row)
        source = hidden + token * hidden_stride + i
        if restores:
            tl.store(source, tl.load(slot, mask=i < width).to(hidden.dtype.element_ty), mask=i < width)
        else:
            tl.store(slot, tl.load(source, mask=i < width).to(tl.float32), mask=i < width)
        if residual is not None:
            source, slot = residual + token * residual_stride + i, slot + width
            if restores:
                tl.store(source, tl.load(slot, mask=i < width).to(residual.dtype.element_ty), mask=i < width)
            else:
                tl.store(slot, tl.load(source, mask=i < width).to(tl.float32), mask=i < width)


@kernel()
def _publish_kernel(live, parked, published, number, rows, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    step, i = tl.load(number) % STEPS, tl.arange(0, BLOCK)
    for first in range(0, rows, BLOCK):
        row, inside = first + i, first + i < rows
        to = published + (step * rows + row) * 2
        tl.store(to, tl.load(live + row, mask=inside), mask=inside)
        tl.store(to + 1, tl.load(parked + row, mask=inside), mask=inside)


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
    boxes: RequestBoxes, layer: int, requests: Tensor, rows: RowStates, pages: Tensor, numbers: Tensor, out: Tensor,
    lse: Tensor, waited: Tensor, time_left: Tensor, counts: Tensor, arrived: Tensor, counters: Tensor,
) -> None:  # fmt: skip
    """Take the answers to the last questions of some rows, as far as they have arrived, and settle the rows.

    A row takes its answer if it asked in this layer and does not park, or if it is parked at this layer. A row that
    does not park holds the stream until its answer arrives or its time is used up. A question that failed has an answer
    too, the empty partial. All tensors but those of ``boxes`` are on the device.

    Args:
        boxes: boxes of all requests.
        layer: layer of the model.
        requests: ``[rows]`` int32: index of each row's request.
        rows: states of the rows, updated in place as by `methods.apex.rows.settle`.
        pages: ``[rows]`` int32 host page of each row's new token.
        numbers: ``[requests]`` int32, as `ask_rows` left them.
        out: ``[rows, heads, head_dim]`` fp32: takes the answer, or 0 where none is taken.
        lse: ``[rows, heads]`` fp32: takes the answer, or -inf where none is taken.
        waited: ``[rows]`` int64 scratch.
        time_left: ``[rows]`` int64 nanoseconds, from which the wait is subtracted; a row waits no longer.
        counts: ``[4, rows]`` int64, any stride of the first dimension: pages and tokens that the first four counters
            count for each row with an answer.
        arrived: ``[1]`` int32 scratch: 0 before and after.
        counters: counters of the layer (`operations.Counters`), to which the longest wait is added as well.
    """
    count, heads, dim = out.shape
    if count:
        _take_rows_kernel[(count,)](
            boxes.out, boxes.lse, boxes.answered, boxes.failed, requests, rows.on_cpu, rows.parks, rows.parked,
            rows.live, rows.asks, rows.stored, rows.tail, rows.growing, counts, pages, numbers, out, lse, waited,
            time_left, arrived, counters, layer, counts.stride(0), boxes.failed.shape[1], heads * dim, heads,
            boxes.answered.shape[1], not triton.knobs.runtime.interpret, _block(heads * dim),
            triton.next_power_of_2(heads), _ROWS, num_warps=1,
        )  # fmt: skip


def move_inputs(
    rows: RowStates, layer: int, hidden: Tensor, residual: Tensor | None, tokens: Tensor | None, slots: Tensor,
    saved: Tensor,
) -> None:  # fmt: skip
    """Restore and save layer inputs like `methods.apex.rows.move_inputs`, in one launch."""
    count, width = len(slots), hidden.shape[1]
    if count:
        _move_kernel[(count, triton.cdiv(width, _MOST))](
            hidden, residual, tokens, slots, saved, rows.parked, rows.live, rows.parks, layer, width, hidden.stride(0),
            0 if residual is None else residual.stride(0), _MOST,
        )  # fmt: skip


def publish(rows: RowStates, number: Tensor, published: Tensor) -> None:
    """Write `live` and `parked` of all rows like `methods.apex.rows.publish`; ``published`` is pinned."""
    steps, count, _ = published.shape
    _publish_kernel[(1,)](rows.live, rows.parked, published, number, count, steps, _ROWS)
