"""Launches of every Triton kernel at one shape, for `bench.triton_compile`: once per variant that is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hybrid_backend.kernels import byte_digests
from hybrid_backend.kernels.cpu import RequestBoxes
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import (
    AGGREGATES,
    SIMILARITIES,
    AwaitedPages,
    Copies,
    Counters,
    Maps,
    Reuse,
    RowStates,
    Sample,
    Selection,
)
from hybrid_backend.kernels.triton import operations as kernels
from hybrid_backend.kernels.triton import predict, questions, signal
from hybrid_backend.methods.selective import MOST_FRAMES

COLUMNS = (512, 32768)  # pages of a row: scores in one tile and in many


def launch_largest(kv_heads: int, group: int, dim: int, page: int) -> None:
    """Call the functions of the kernels that hold whole pages in shared memory, in bf16."""
    rows = 4
    host = torch.empty(8, kv_heads, 2, page, dim, dtype=torch.bfloat16)
    coded = torch.empty(8, kv_heads, 4 * dim, dtype=torch.uint8)
    q = torch.empty(rows, kv_heads * group, dim, dtype=torch.bfloat16)
    line, table = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, COLUMNS[0], dtype=torch.int32)
    kernels.paged_partial(q, host, table[:, None, :64], line[:, None], dim**-0.5, 32)
    kernels.build_digests(host, coded, line, line)
    kernels.page_scores(q, coded, table, line, line, "softmax", False, 0.5, dim**-0.5, page)
    encoded = torch.empty(KvFormat(kv_heads, page, dim, torch.int8).shape(8), dtype=torch.int8)
    kernels.paged_partial(q, encoded, table[:, None, :64], line[:, None], dim**-0.5, 32)
    kernels.build_digests(encoded, coded, line, line)


def launch_all(kv_heads: int, group: int, dim: int, page: int, dtype: torch.dtype, columns: Sequence[int]) -> None:
    """Call each kernel's function once per variant."""
    rows, heads, k = 4, kv_heads * group, 64
    host = torch.empty(8, kv_heads, 2, page, dim, dtype=dtype)
    digests = torch.empty(8, kv_heads, 2, dim, dtype=dtype)
    coded, rounded = (torch.empty(8, kv_heads, row, dtype=torch.uint8) for row in (4 * dim, byte_digests.row(dim)))
    q, new = torch.empty(rows, heads, dim, dtype=dtype), torch.empty(rows, kv_heads, dim, dtype=dtype)
    line = torch.zeros(rows, dtype=torch.int32)
    long = torch.zeros(rows, dtype=torch.int64)
    table = torch.zeros(rows, max(COLUMNS), dtype=torch.int32)
    cpu = torch.empty(rows, heads, dim), torch.empty(rows, heads)
    counters = torch.zeros(len(Counters._fields), dtype=torch.int64)
    for lists in (1, kv_heads):
        ids, tokens = torch.zeros(rows, lists, k, dtype=torch.int32), torch.zeros(rows, lists, dtype=torch.int32)
        box = Sample(q[0], table[0], ids[0], tokens[0], cpu[1], line[:1])
        for predicted in (q, None):
            kernels.take_sample(q, predicted, ids, tokens, table, line, line[:1], line[:1], line[:1], box)
        for parts in (1, 32):
            partials = kernels.paged_partial(q, host, ids, tokens, dim**-0.5, parts)
            if lists == kv_heads:
                heads_of_pages = host.flatten(0, 1)[:, None]
                for kv, chosen in ((heads_of_pages, None), (heads_of_pages, ids), (host, ids[:, :1])):
                    kernels.paged_partial(q, kv, chosen, tokens, dim**-0.5, parts, begins=tokens)
            for other in (None, cpu):
                for sinks in (None, cpu[1][0]):
                    kernels.merge_partials(*partials, other, dtype, sinks)
    kernels.page_weights(
        q, host, table[:, None, :k], table[:, None, :k], line[:, None], cpu[1], torch.empty(8, kv_heads, page),
        dim**-0.5, 0.3, True,
    )  # fmt: skip
    kernels.build_digests(host, digests, line, line)
    awaited = AwaitedPages(line, line[:1], line[:1], torch.zeros(8, rows, dtype=torch.int32), long[:1])
    kernels.append_tokens(new, new, host, line, line, host, line, table, digests, awaited=awaited)
    kernels.build_digests(host, coded, line, line)
    kernels.append_tokens(new, new, host, line, long, digests=coded)
    kernels.build_digests(host, rounded, line, line)
    kernels.append_tokens(new, new, host, line, line, host, line, table, rounded, awaited=awaited)
    kernels.append_tokens(new, new, host, line, long, digests=rounded)
    again = Reuse(line, *[table[:, :1]] * 3, torch.zeros(rows, 1, max(COLUMNS)))
    for reuse in (None, again):
        kernels.page_scores(q, coded, table, line, line, "softmax", False, 0.5, dim**-0.5, page, reuse=reuse)
    kernels.append_tokens(new, new, host, line, long)
    kernels.append_tokens(new, new, host, line, line, heads=long)
    kernels.store_tokens(new, new, host, line, long)
    kernels.extend_digests(new, digests, line, 3, page)
    whole = torch.empty(2 * page, kv_heads, dim, dtype=dtype)
    for store in (rounded, coded):
        kernels.extend_digests(whole, store, line[:2], 0, page)
    chunk, sums = q[:, :, None], cpu[1][:, :, None]  # of prompts: partials in the queries' type, and merged ones
    kernels.merge_partials(chunk, sums, (q, cpu[1]))
    kernels.merge_partials(cpu[0][:, :, None], sums, (q, cpu[1]), into=cpu[0])
    for aggregate, counted in zip(SIMILARITIES, (counters, None), strict=True):
        kernels.match_labels(q, q, cpu[1][0], cpu[1][0, :kv_heads], line, line, line, aggregate, counted)
    for width in columns:
        for per_head in (False, True):
            for aggregate in AGGREGATES:
                lists = kv_heads if per_head else 1
                again = Reuse(line, *[table[:, :lists]] * 3, torch.zeros(rows, lists, width))
                for store, reuse in itertools.product((digests, rounded), (None, again)):
                    scores = kernels.page_scores(
                        q, store, table[:, :width], line, line, aggregate, per_head, 0.5, dim**-0.5, reuse=reuse
                    )
            frame_of = torch.zeros(rows, width, dtype=torch.int32)
            frames = (frame_of, None, None), (frame_of, counters, None), (None, counters, None)
            for resident, counted, reuse in (*frames, (frame_of, counters, again), (frame_of, None, again)):
                mailbox = None if counted is None else (ids, tokens)
                chosen = kernels.select_pages(
                    scores, line, line, line, line, resident, table[:, :width], page, 1, 2, k, counted, mailbox, reuse
                )
        kernels.union_pages(chosen.absent, chosen.missing_listed, scores)
    maps = Maps(table[None], table, torch.zeros(1, max(COLUMNS)))
    copies = Copies(*[table[None, :, :k]] * 3, torch.zeros(1, rows, k), line[None], long[None])
    scores = torch.zeros(rows, 1, max(COLUMNS))
    for size in (k, 4 * k, MOST_FRAMES):  # frames of a request
        small = Maps(table[None], torch.zeros(1, rows * size, dtype=torch.int32), torch.zeros(1, rows * size))
        keep = torch.zeros(rows, size, dtype=torch.int32)
        for lists, listed in ((1, k), (kv_heads, k), (1, 8 * MOST_FRAMES)):
            absent = (table[:, None, :listed], line[:, None])
            chosen = table[:, None, :k].expand(-1, lists, -1).contiguous(), line[:, None].expand(-1, lists).contiguous()
            kernels.plan_recall(
                small.of(0),
                copies.of(0),
                scores,
                table,
                chosen,
                absent,
                line,
                line,
                line,
                line,
                line,
                1,
                2,
                8,
                3,
                keep,
                counters,
            )
        kernels.note_scores(small.of(0), scores, line, line, line, 1, 2)
        kernels.open_pages(small, line, line, line, page, 1)
    kernels.commit_pages(maps, copies, long)
    kernels.copy_pages(host, host, line, line)
    signal.ask(q, q, line, line[:1], line[:1], line[:, None], counters)
    signal.await_answer(line, line[:1], line, long[:1], counters)
    signal.arrive(line[:1], 3)
    flags = torch.zeros(rows, 16, dtype=torch.int32)
    boxes = RequestBoxes(q, table, line, line, *cpu, flags, flags, flags)
    questions.ask_rows(boxes, q, table, line, line, line, 3, line)
    states = RowStates(*[line] * len(RowStates._fields))
    questions.take_rows(boxes, 3, line, states, line, line, *cpu, long, long, long.expand(4, -1), line, counters)
    published = torch.zeros(8, rows, 2, dtype=torch.int32)
    questions.publish(states, line[:1], published)
    hidden, saved = q.flatten(1), torch.empty(rows + 1, 2, heads * dim)
    for residual, tokens in ((hidden, None), (None, None), (hidden, long)):
        questions.move_inputs(states, 3, hidden, residual, tokens, long, saved)
    plan_heads(kv_heads, page)
    predict_all(q)


def launch_encoded(kv_heads: int, group: int, dim: int, page: int, dtype: torch.dtype) -> None:
    """Call each function of the kernels that read or write pages, once per variant, with pages in 8 bits."""
    rows, k = 4, 64
    host = torch.empty(KvFormat(kv_heads, page, dim, torch.int8).shape(8), dtype=torch.int8)
    digests = torch.empty(8, kv_heads, 2, dim, dtype=dtype)
    coded, rounded = (torch.empty(8, kv_heads, row, dtype=torch.uint8) for row in (4 * dim, byte_digests.row(dim)))
    q, new = torch.empty(rows, kv_heads * group, dim, dtype=dtype), torch.empty(rows, kv_heads, dim, dtype=dtype)
    line, long = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    table, lse = torch.zeros(rows, 1, COLUMNS[0], dtype=torch.int32), torch.empty(rows, kv_heads * group)
    for lists in (1, kv_heads):
        ids, tokens = torch.zeros(rows, lists, k, dtype=torch.int32), torch.zeros(rows, lists, dtype=torch.int32)
        kernels.paged_partial(q, host, ids, tokens, dim**-0.5, 32)
    heads_of_pages = host.flatten(0, 1)[:, None]
    for kv, chosen in ((heads_of_pages, None), (heads_of_pages, ids), (host, ids[:, :1])):
        kernels.paged_partial(q, kv, chosen, tokens, dim**-0.5, 32, begins=tokens)
    average = torch.empty(8, kv_heads, page)
    kernels.page_weights(q, host, table, table, line[:, None], lse, average, dim**-0.5, 0.3, True)
    for store in (digests, coded, rounded):
        kernels.build_digests(host, store, line, line)
    awaited = AwaitedPages(line, line[:1], line[:1], torch.zeros(8, rows, dtype=torch.int32), long[:1])
    for store in (digests, rounded):
        kernels.append_tokens(new, new, host, line, line, host, line, table[:, 0], store, awaited=awaited)
    for store in (None, rounded, coded):
        kernels.append_tokens(new, new, host, line, long, digests=store)
    kernels.append_tokens(new, new, host, line, line, heads=long)
    kernels.store_tokens(new, new, host, line, long)
    kernels.copy_pages(host, host, line, line)


def plan_heads(kv_heads: int, page: int) -> None:
    """Compile the kernels that plan copies of pages of single KV heads."""
    lists, ranks = torch.zeros(4 * kv_heads, 1, 64, dtype=torch.int32), torch.zeros(kv_heads, dtype=torch.int32)
    number, frames = lists[:, :, 0], lists[:, 0, :60].contiguous()
    chosen = Selection(lists, number, lists, number, number, lists, lists, number)
    kernels.plan_load(chosen, number, number, frames, 1, frames)
    table, line = torch.zeros(4, COLUMNS[0], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for edges in ((0, 1, False), (1, 17, True)):
        kernels.plan_stream(table, line, line, ranks, 2, 2, 3, 1000, page, *edges)


def predict_all(q: torch.Tensor) -> None:
    """Compile the kernels of the prediction, for hidden states as wide as all heads and as those of the largest models.

    Queries have norms of heads or of all heads together, and rotary embedding of both styles, of all or half of a head.
    """
    rows, heads, dim = q.shape
    for width in (heads * dim, 16384):
        hidden = q.new_empty(rows, width)
        for adds_one, residual in ((False, None), (False, hidden), (True, hidden)):
            predict.normed_stream(hidden, residual, predict.RmsNorm(q.new_empty(width), 1e-6, adds_one))
    of_heads, of_all = (predict.RmsNorm(q.new_empty(n), 1e-6, n == dim) for n in (dim, heads * dim))
    positions = torch.zeros(rows, dtype=torch.int64)
    whole, half = (predict.Rotation(positions, q.new_empty(8, n), n == dim) for n in (dim, dim // 2))
    for norm in (None, of_heads, of_all):
        for rotation in (None, whole, half):
            predict.finished_queries(q, norm, rotation)
