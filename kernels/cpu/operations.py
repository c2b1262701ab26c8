"""The operations of `kernels.operations` in native C++ (``src/op_*.cpp``).

An operation is one call into the library, which does small work at once and shares larger work with the engine's OpenMP
threads. All operations raise ValueError for a tensor that breaks the contract, and WorkerError for an id out of range
or a shape that the kernels lack. Kernels need a head_dim that is a multiple of 16 up to 512; where pages are attended,
also a page_size that is a multiple of 16 up to 128.
"""

from __future__ import annotations

import torch
from torch import Tensor, empty, float32, int8, int32, int64

from hybrid_backend.kernels import oracle
from hybrid_backend.kernels.awaited_pages import await_pages
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.arguments import (
    address,
    call,
    copies_arguments,
    counters_address,
    digests_address,
    group_size,
    list_strides,
    maps_arguments,
    paged_arguments,
    reuse_arguments,
    rows_address,
    team_arguments,
    tokens_address,
)
from hybrid_backend.kernels.cpu.labels import match_labels as match_labels
from hybrid_backend.kernels.digest_format import digest_format_of
from hybrid_backend.kernels.head_oracle import plain_lists
from hybrid_backend.kernels.head_oracle import plan_load as plan_load
from hybrid_backend.kernels.head_oracle import plan_stream as plan_stream
from hybrid_backend.kernels.operations import (
    AGGREGATES,
    AwaitedPages,
    Copies,
    Maps,
    Reuse,
    Sample,
    Selection,
    check_one_query,
)


def append_tokens(
    k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor,
    frames: Tensor | None = None, requests: Tensor | None = None, frame_of: Tensor | None = None,
    digests: Tensor | None = None, heads: Tensor | None = None, awaited: AwaitedPages | None = None,
) -> None:  # fmt: skip
    await_pages(awaited, requests, pages)
    if heads is not None:
        k, v = k.index_select(1, heads), v.index_select(1, heads)
    kind = k.dtype
    store = paged_arguments(host, kind)
    rows, token = pages.numel(), store[3] * store[5]
    framed = (0, 0, 0)
    frame_count = request_count = columns = 0
    if frames is not None and requests is not None and frame_of is not None:
        frame_count = frames.shape[0]
        request_count, columns = frame_of.shape
        framed = (
            address(frames, host.dtype, frame_count * host[0].numel()),
            address(requests, int32, rows),
            address(frame_of, int32),
        )
    wide = positions.dtype is int64
    call(
        "hb_append_tokens", *store, tokens_address(k, kind, rows, token), tokens_address(v, kind, rows, token),
        address(pages, int32), address(positions, int64 if wide else int32, rows), *framed,
        *digests_address(digests, kind, store[1], store[3], store[5]), rows, wide, frame_count, request_count, columns,
        k.stride(0), v.stride(0),
    )  # fmt: skip


def store_tokens(k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor) -> None:
    append_tokens(k, v, host, pages, positions)


def extend_digests(k: Tensor, digests: Tensor, pages: Tensor, first: int, page_size: int) -> None:
    if digest_format_of(digests, k.shape[2]).covers_growing_pages:
        tokens, kv_heads, dim = k.shape
        kind, count = k.dtype, digests.shape[0]
        return call(
            "hb_extend_digests", tokens_address(k, kind, tokens, kv_heads * dim),
            address(digests, kind, count * kv_heads * 2 * dim), address(pages, int32), lib.dtype_number(kind), kv_heads,
            dim, count, page_size, tokens, first, pages.numel(), k.stride(0), *team_arguments(),
        )  # fmt: skip
    keys = k.unflatten(0, (-1, page_size)).transpose(1, 2)
    kv = torch.stack([keys, keys], 2)  # pages whose values are not read
    rows, ids = torch.empty_like(digests[: len(pages)]), torch.arange(len(pages), dtype=int32)
    build_digests(kv, rows, ids, torch.full_like(ids, page_size))
    digests.index_copy_(0, pages.long(), rows)


def build_digests(kv: Tensor, digests: Tensor, pages: Tensor, tokens: Tensor) -> None:
    n, kind = pages.numel(), kv.dtype
    if kind is int8:
        kind = digests.dtype if digests.is_floating_point() else float32
    store = paged_arguments(kv, kind)
    digests_at, number = digests_address(digests, kind, store[1], store[3], store[5])
    call(
        "hb_build_digests", *store, digests_at, address(pages, int32), address(tokens, int32, n), number,
        n, *team_arguments(),
    )  # fmt: skip


def page_scores(
    q: Tensor, digests: Tensor, table: Tensor, num_pages: Tensor, budgets: Tensor, aggregate: str,
    per_head: bool, bound: float, scale: float, page_size: int = 0, query_start: Tensor | None = None,
    reuse: Reuse | None = None,
) -> Tensor:  # fmt: skip
    if query_start is not None:
        check_one_query(query_start, len(table))
    return page_scores_with(
        None, q, digests, table, num_pages, budgets, aggregate, per_head, bound, scale, page_size, reuse
    )


def page_scores_with(
    isa: str | None, q: Tensor, digests: Tensor, table: Tensor, num_pages: Tensor, budgets: Tensor, aggregate: str,
    per_head: bool, bound: float, scale: float, page_size: int = 0, reuse: Reuse | None = None,
) -> Tensor:  # fmt: skip
    """Score pages like `page_scores`, with the kernels of instruction set ``isa``; None: the chosen kernels."""
    rows, heads, dim = q.shape
    pages, kv_heads = digests.shape[:2]
    columns = table.shape[1]
    kind = q.dtype
    digests_at, number = digests_address(digests, kind, pages, kv_heads, dim)
    lists = kv_heads if per_head else 1
    out = empty(rows, lists, columns, dtype=float32) if reuse is None else reuse.scores[:rows]
    call(
        "hb_page_scores", address(q, kind), digests_at, rows_address(table, rows),
        address(num_pages, int32, rows), address(budgets, int32, rows), address(out, float32, rows * lists * columns),
        rows, columns, table.stride(0), pages, lib.dtype_number(kind), kv_heads, group_size(heads, kv_heads), dim,
        page_size, number, AGGREGATES.index(aggregate), per_head, lib.isa_index(isa),
        *reuse_arguments(reuse, rows, lists), *team_arguments(), bound, scale,
    )  # fmt: skip
    return out


def select_pages(
    scores: Tensor, num_pages: Tensor, seq_lens: Tensor, budgets: Tensor, requests: Tensor,
    frame_of: Tensor | None, table: Tensor, page_size: int, sinks: int, recent: int, max_pages: int,
    counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None, reuse: Reuse | None = None,
) -> Selection:  # fmt: skip
    rows, lists, columns = scores.shape
    selected, listed = empty(4, rows, lists, max_pages, dtype=int32), empty(4, rows, lists, dtype=int32)
    request_count, frame_columns = frame_of.shape if frame_of is not None else (0, 0)
    call(
        "hb_select_pages", address(scores, float32), address(num_pages, int32, rows), address(seq_lens, int32, rows),
        address(budgets, int32, rows), address(requests, int32, rows),
        address(frame_of, int32) if frame_of is not None else 0,
        rows_address(table, rows, columns), counters_address(counters), selected.data_ptr(), listed.data_ptr(),
        rows, lists, columns, table.stride(0), request_count, frame_columns, page_size, sinks, recent, max_pages,
        *reuse_arguments(reuse, rows, lists, max_pages), *team_arguments(),
    )  # fmt: skip
    pages, frames, missing, absent = selected.unbind()
    pages_listed, frames_listed, tokens, missing_listed = listed.unbind()
    if reuse is not None:
        pages, pages_listed = reuse.pages[:rows], reuse.pages_listed[:rows]
    if mailbox is not None:
        missing = mailbox[0][:rows].copy_(missing)
        mailbox[1][:rows].copy_(missing_listed)
    return Selection(pages, pages_listed, frames, frames_listed, tokens, missing, absent, missing_listed)


def union_pages(absent: Tensor, listed: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, lists, k = absent.shape
    columns = scores.shape[2]
    most = min(lists * k, columns)
    pages, count = empty(rows, 1, most, dtype=int32), empty(rows, 1, dtype=int32)
    best = empty(rows, 1, columns, dtype=float32)
    call(
        "hb_union_pages", address(absent, int32), address(listed, int32, rows * lists),
        address(scores, float32, rows * lists * columns), pages.data_ptr(), count.data_ptr(), best.data_ptr(),
        rows, lists, k, columns, most, *team_arguments(),
    )  # fmt: skip
    return pages, count, best


def paged_partial(
    q: Tensor, kv: Tensor, ids: Tensor | None, tokens: Tensor, scale: float, num_parts: int = 1,
    query_start: Tensor | None = None, begins: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend whole lists: the first part is the whole list, and the other parts are empty."""
    if query_start is not None:
        check_one_query(query_start, len(tokens))
    shape = (*q.shape[:2], num_parts)
    q, ids, tokens = plain_lists(q, kv, ids, tokens, begins)
    rows, heads, dim = q.shape
    store = paged_arguments(kv, q.dtype)
    row_stride, list_stride = list_strides(ids, rows)
    _, lists, n = ids.shape
    if dim != store[5]:
        raise ValueError(f"queries of {dim} channels do not fit pages of {store[5]}")
    if lists != 1 and lists != store[3]:
        raise ValueError(f"lists must be 1 or one per KV head ({store[3]}), not {lists}")
    out, lse = empty(rows, heads, 1, dim, dtype=float32), empty(rows, heads, 1, dtype=float32)
    call(
        "hb_paged_partial", *store, address(q, q.dtype), ids.data_ptr(), address(tokens, int32, rows * lists),
        out.data_ptr(), lse.data_ptr(), rows, lists, n, row_stride, list_stride, group_size(heads, store[3]),
        lib.isa_index(None), *team_arguments(), scale,
    )  # fmt: skip
    if num_parts > 1:
        out = torch.nn.functional.pad(out, (0, 0, 0, num_parts - 1))
        lse = torch.nn.functional.pad(lse, (0, num_parts - 1), value=float("-inf"))
    out, lse = out.view(*shape, dim), lse.view(shape)
    return (out, lse) if into is None else (into[0].copy_(out), into[1].copy_(lse))


def parts_for(rows: int, kv_heads: int, most_tokens: int, processors: int) -> int:
    """Return 1, because threads share a list without parts."""
    return 1


def merge_partials(
    out: Tensor, lse: Tensor, extra_partial: tuple[Tensor, Tensor] | None = None, dtype: torch.dtype = torch.float32,
    sinks: Tensor | None = None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, heads, num_parts, dim = out.shape
    items = rows * heads
    out = out.float()
    merged, merged_lse = (
        empty(rows, heads, dim, dtype=dtype) if into is None else into,
        empty(rows, heads, dtype=float32),
    )
    extra_addresses = (0, 0)
    if extra_partial is not None:
        extra_out = extra_partial[0].float()  # a reference that keeps the memory until the call ends
        extra_addresses = address(extra_out, float32, items * dim), address(extra_partial[1], float32, items)
    call(
        "hb_merge_partials", address(out, float32), address(lse, float32, items * num_parts), *extra_addresses,
        0 if sinks is None else address(sinks, float32, heads), address(merged, dtype, items * dim),
        merged_lse.data_ptr(),
        rows, heads, num_parts, dim, lib.dtype_number(dtype), lib.isa_index(None), *team_arguments(),
    )  # fmt: skip
    return merged, merged_lse


def attend_prompt(
    q: Tensor, kv: Tensor, pages: Tensor, seq_len: int, scale: float, window: int | None, sinks: Tensor | None,
    out: Tensor, isa: str | None = None, new: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Attend a prompt's newest tokens exactly and causally, over pages that have their keys and values already.

    Args:
        q: queries ``[tokens, heads, head_dim]``, any row stride: the last of ``seq_len`` tokens.
        kv: pages (`KvFormat`), of the dtype of ``q`` or in 8 bits.
        pages: ``[n]`` int32 pages of the sequence; pages that no window reaches are not read.
        seq_len: tokens of the sequence.
        scale: factor of the logits.
        window: tokens that each query attends at most, its own included; None: all.
        sinks: ``[heads]`` fp32 (`attention.partial.with_sinks`), or None.
        out: takes the result, like ``q``.
        isa: instruction set; None: the chosen kernels.
        new: K and V of the newest tokens, ``[tokens, kv_heads, head_dim]`` like ``q``, which are attended instead of
            what the pages hold of these tokens; None: the pages'.
    """
    tokens, heads, dim = q.shape
    store = paged_arguments(kv, q.dtype)
    if dim != store[5]:
        raise ValueError(f"queries of {dim} channels do not fit pages of {store[5]}")
    if out.shape != q.shape:
        raise ValueError(f"out must be {tuple(q.shape)} as the queries, not {tuple(out.shape)}")
    k, v = (0, 0) if new is None else (tokens_address(x, q.dtype, tokens, store[3] * dim) for x in new)
    new_strides = (0, 0) if new is None else (new[0].stride(0), new[1].stride(0))
    call(
        "hb_attend_prompt", *store, tokens_address(q, q.dtype, tokens, heads * dim), k, v, address(pages, int32),
        0 if sinks is None else address(sinks, float32, heads), tokens_address(out, q.dtype, tokens, heads * dim),
        tokens, seq_len, pages.numel(), group_size(heads, store[3]), window or 0, q.stride(0), *new_strides,
        out.stride(0), lib.isa_index(isa), *team_arguments(), scale,
    )  # fmt: skip


def prompt_weights(
    q: Tensor, kv: Tensor, pages: Tensor, tokens: int, first: int, older: int, scale: float, isa: str | None = None
) -> Tensor:
    count, heads, dim = q.shape
    store = paged_arguments(kv, q.dtype)
    if dim != store[5]:
        raise ValueError(f"queries of {dim} channels do not fit pages of {store[5]}")
    weights = empty(store[3], max(tokens - first, 0), dtype=float32)
    call(
        "hb_prompt_weights", *store, address(q, q.dtype), address(pages, int32), weights.data_ptr(), count, tokens,
        first, older, pages.numel(), group_size(heads, store[3]), lib.isa_index(isa), *team_arguments(), scale,
    )  # fmt: skip
    return weights


def page_weights(
    q: Tensor, kv: Tensor, ids: Tensor, places: Tensor, tokens: Tensor, lse: Tensor, average: Tensor,
    scale: float, alpha: float, largest: bool,
) -> None:  # fmt: skip
    rows, heads, dim = q.shape
    store = paged_arguments(kv, q.dtype)
    (row_stride, _), (place_stride, _) = list_strides(ids, rows), list_strides(places, rows)
    if dim != store[5]:
        raise ValueError(f"queries of {dim} channels do not fit pages of {store[5]}")
    call(
        "hb_page_weights", *store, address(q, q.dtype), ids.data_ptr(), places.data_ptr(),
        address(tokens, int32, rows),
        address(lse, float32, rows * heads), address(average, float32, len(average) * store[3] * store[4]), rows,
        ids.shape[2],
        row_stride, place_stride, len(average), group_size(heads, store[3]), largest, lib.isa_index(None),
        *team_arguments(), scale,
        alpha,
    )  # fmt: skip


def note_scores(
    maps: Maps, scores: Tensor, num_pages: Tensor, budgets: Tensor, requests: Tensor, sinks: int, recent: int
) -> None:
    _note_scores(maps_arguments(maps), scores, num_pages, budgets, requests, sinks, recent)


def _note_scores(
    places: tuple[int, ...], scores: Tensor, num_pages: Tensor, budgets: Tensor, requests: Tensor, sinks: int,
    recent: int,
) -> None:  # fmt: skip
    """Call `note_scores` for maps whose arguments ``places`` are known."""
    rows, lists, columns = scores.shape
    call(
        "hb_note_scores", *places, address(scores, float32), address(num_pages, int32, rows),
        address(budgets, int32, rows),
        address(requests, int32, rows), rows, lists, columns, sinks, recent,
    )  # fmt: skip


def plan_recall(
    maps: Maps, copies: Copies, scores: Tensor, table: Tensor, selected: tuple[Tensor, Tensor],
    absent: tuple[Tensor, Tensor], num_pages: Tensor, budgets: Tensor, requests: Tensor, generations: Tensor,
    ages: Tensor, sinks: int, recent: int, interval: int, phase: int, keep: Tensor, counters: Tensor | None = None,
) -> None:  # fmt: skip
    rows, _, columns = scores.shape
    _, lists, k = selected[0].shape
    n = absent[0].shape[2]
    places, room = maps_arguments(maps), copies_arguments(copies)
    _note_scores(places, scores, num_pages, budgets, requests, sinks, recent)
    if room[6] < rows or keep.numel() < rows * places[6]:
        raise ValueError(f"copies of {room[6]} rows and scratch of {keep.numel()} are too small for {rows} rows")
    call(
        "hb_plan_recall", *places, *room, address(scores, float32, rows * columns), rows_address(table, rows, columns),
        address(selected[0], int32, rows * lists * k), address(selected[1], int32, rows * lists),
        address(absent[0], int32, rows * n), address(absent[1], int32, rows), address(num_pages, int32, rows),
        address(requests, int32, rows), address(generations, int32, rows), address(ages, int32, rows),
        address(keep, int32),
        counters_address(counters), rows, columns, table.stride(0), lists, k, n, interval, phase,
    )  # fmt: skip


def copy_pages(host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor) -> None:
    pages, count = host.shape[0], frames.shape[0]
    if not pages:
        return
    page = host.numel() // pages  # elements
    n = frame_ids.numel()
    call(
        "hb_copy_pages", address(host, host.dtype), address(frames, host.dtype, count * page),
        address(host_pages, int32, n),
        address(frame_ids, int32), n, page * host.element_size(), pages, count, *team_arguments(),
    )  # fmt: skip


def commit_pages(maps: Maps, copies: Copies, generations: Tensor) -> None:
    places, room = maps_arguments(maps), copies_arguments(copies)
    if copies.requests.numel() != places[3] * room[6]:
        raise ValueError(f"copies of {len(copies.frames)} layers do not fit maps of {places[3]}")
    call("hb_commit_pages", *places, *room, address(generations, int64, places[4]))


def open_pages(maps: Maps, requests: Tensor, pages: Tensor, positions: Tensor, page_size: int, sinks: int) -> None:
    rows = requests.numel()
    call(
        "hb_open_pages", *maps_arguments(maps), address(requests, int32), address(pages, int32, rows),
        address(positions, int32, rows),
        rows, page_size, sinks,
    )  # fmt: skip


def take_sample(
    q: Tensor, predicted: Tensor | None, pages: Tensor, listed: Tensor, table: Tensor, num_pages: Tensor,
    sampled_row: Tensor, step_number: Tensor, arrived: Tensor, into: Sample,
) -> None:  # fmt: skip
    # The sample is a few small copies, for which torch is fast enough.
    oracle.take_sample(q, predicted, pages, listed, table, num_pages, sampled_row, step_number, arrived, into)
