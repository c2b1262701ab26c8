"""Samples of a layer's inputs, which are copied to the host in the steps that sample the layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.operations import Sample
from hybrid_backend.kernels.triton.common import kernel
from hybrid_backend.kernels.triton.signal import raise_flag

_BLOCK = 1024  # elements that a program copies at once
_TILE = 2048  # elements of queries that a program holds at once


@kernel("q", "predicted", "box_q")
def _sample_kernel(q, predicted, is_predicted, pages, listed, table, num_pages, sampled_row, number, arrived, box_q,
                   box_table, box_pages, box_listed, box_cosines, box_number, k, table_stride,
                   HEADS: tl.constexpr, DIM: tl.constexpr, LISTS: tl.constexpr, REAL: tl.constexpr,
                   BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    chosen = tl.load(sampled_row) - 1
    if chosen >= 0:
        row, programs = tl.program_id(0), tl.num_programs(0)
        line, d = row.to(tl.int64), tl.arange(0, BLOCK_D)
        for first in range(0, HEADS, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            live = (h < HEADS)[:, None] & (d < DIM)[None, :]
            elements = (line * HEADS + h)[:, None] * DIM + d[None, :]
            a = tl.load(q + elements, mask=live, other=0.0).to(tl.float32)
            b = tl.load(predicted + elements, mask=live, other=0.0).to(tl.float32)
            lengths = tl.sqrt(tl.sum(a * a, 1)) * tl.sqrt(tl.sum(b * b, 1))
            cosine = tl.where(lengths == 0, 0.0, tl.sum(a * b, 1) / tl.where(lengths == 0, 1.0, lengths))
            cosine = tl.where(is_predicted > 0, cosine, float("nan"))
            tl.store(box_cosines + line * HEADS + h, cosine, mask=h < HEADS)
        if row == chosen:
            i = tl.arange(0, BLOCK)
            for first in range(0, HEADS * DIM, BLOCK):
                inside = first + i < HEADS * DIM
                tl.store(box_q + first + i, tl.load(q + line * HEADS * DIM + first + i, mask=inside), mask=inside)
            num_row_pages = tl.load(num_pages + row)
            for first in range(0, num_row_pages, BLOCK):
                inside = first + i < num_row_pages
                page = tl.load(table + line * table_stride + first + i, mask=inside)
                tl.store(box_table + first + i, page, mask=inside)
            for listing in range(LISTS):
                count, start = tl.load(listed + line * LISTS + listing), (line * LISTS + listing) * k
                tl.store(box_listed + listing, count)
                for first in range(0, count, BLOCK):
                    inside = first + i < count
                    page = tl.load(pages + start + first + i, mask=inside)
                    tl.store(box_pages + listing * k + first + i, page, mask=inside)
        tl.debug_barrier()  # All threads must have written before the program adds itself to `arrived`.
        # The last program raises the flag, when everything is written.
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
        if before == programs - 1:
            tl.store(arrived, 0)
            raise_flag(box_number, tl.load(number), REAL)


def take_sample(
    q: Tensor, predicted: Tensor | None, pages: Tensor, listed: Tensor, table: Tensor, num_pages: Tensor,
    sampled_row: Tensor, step_number: Tensor, arrived: Tensor, into: Sample,
) -> None:  # fmt: skip
    rows, heads, dim = q.shape
    block_d = triton.next_power_of_2(dim)
    if rows:
        # The kernel is compiled once for steps with and without a predicted query.
        _sample_kernel[(rows,)](
            q, q if predicted is None else predicted, 0 if predicted is None else 1, pages, listed, table, num_pages,
            sampled_row, step_number, arrived, *into, pages.shape[2], table.stride(0),
            heads, dim, pages.shape[1], not triton.knobs.runtime.interpret, _BLOCK,
            min(triton.next_power_of_2(heads), max(1, _TILE // block_d)), block_d, num_warps=4,
        )  # fmt: skip
