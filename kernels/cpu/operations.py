"""The operations of `kernels/operations.py` in native C++ (src/operations.cpp, src/residency.cpp).

Each is one call into the library, which does small work at once and shares what is worth it with the engine's OpenMP
threads. Arguments are checked as far as memory depends on it: dtypes, sizes, contiguity here, ids in the library.

Raises, all of them: ValueError for a tensor that is not what the contract says; WorkerError for an id beyond what there
is, and for a shape that the kernels lack (head_dim: a multiple of 16 up to 256; where pages are attended, page_size: a
multiple of 16 up to 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, empty, float32, int32, int64

from hybrid_backend.kernels import byte_digests, oracle
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.decode import openmp_entry
from hybrid_backend.kernels.operations import (
    AGGREGATES,
    DIGESTS,
    SIMILARITIES,
    Copies,
    Counters,
    Maps,
    Sample,
    Selection,
    digest_kind,
)  # fmt: skip

_COUNTERS = len(Counters._fields)


def append_tokens(
    k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor,
    frames: Tensor | None = None, requests: Tensor | None = None, frame_of: Tensor | None = None,
    digests: Tensor | None = None,
) -> None:  # fmt: skip
    store = _paged(host)
    rows, token, kind = pages.numel(), store[3] * store[5], host.dtype
    framed = (0, 0, 0)
    frame_count = request_count = columns = 0
    if frames is not None and requests is not None and frame_of is not None:
        frame_count = frames.shape[0]
        request_count, columns = frame_of.shape
        room = frame_count * 2 * store[4] * token
        framed = (_at(frames, kind, room), _at(requests, int32, rows), _at(frame_of, int32))
    wide = positions.dtype is int64
    _call(
        "hb_append_tokens", *store, _tokens_at(k, kind, rows, token), _tokens_at(v, kind, rows, token),
        _at(pages, int32), _at(positions, int64 if wide else int32, rows), *framed,
        *_digests_at(digests, kind, store[1], store[3], store[5]), rows, wide, frame_count, request_count, columns,
        k.stride(0), v.stride(0),
    )  # fmt: skip


def store_tokens(k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor) -> None:
    append_tokens(k, v, host, pages, positions)


def extend_digests(k: Tensor, digests: Tensor, pages: Tensor, first: int, page_size: int) -> None:
    if digest_kind(digests, k.shape[2]) == "minmax":
        tokens, kv_heads, dim = k.shape
        kind, count = k.dtype, digests.shape[0]
        return _call(
            "hb_extend_digests", _tokens_at(k, kind, tokens, kv_heads * dim),
            _at(digests, kind, count * kv_heads * 2 * dim), _at(pages, int32), _type(kind), kv_heads, dim, count,
            page_size, tokens, first, pages.numel(), k.stride(0), *_team(),
        )  # fmt: skip
    keys = k.unflatten(0, (-1, page_size)).transpose(1, 2)
    kv = torch.stack([keys, keys], 2)  # as pages; their values are not looked at
    rows, ids = torch.empty_like(digests[: len(pages)]), torch.arange(len(pages), dtype=int32)
    build_digests(kv, rows, ids, torch.full_like(ids, page_size))
    digests.index_copy_(0, pages.long(), rows)


def build_digests(kv: Tensor, digests: Tensor, pages: Tensor, tokens: Tensor) -> None:
    n = pages.numel()
    digests_at, kind = _digests_at(digests, kv.dtype, kv.shape[0], kv.shape[1], kv.shape[4])
    _call(
        "hb_build_digests", *_paged(kv), digests_at, _at(pages, int32), _at(tokens, int32, n), kind, n, *_team(),
    )  # fmt: skip


def page_scores(
    q: Tensor, digests: Tensor, table: Tensor, num_pages: Tensor, budgets: Tensor, aggregate: str,
    per_head: bool, bound: float, scale: float, page_size: int = 0,
) -> Tensor:  # fmt: skip
    return page_scores_with(None, q, digests, table, num_pages, budgets, aggregate, per_head, bound, scale, page_size)


def page_scores_with(
    isa: str | None, q: Tensor, digests: Tensor, table: Tensor, num_pages: Tensor, budgets: Tensor, aggregate: str,
    per_head: bool, bound: float, scale: float, page_size: int = 0,
) -> Tensor:  # fmt: skip
    """`page_scores` with an instruction set; None: the best that there is."""
    rows, heads, dim = q.shape
    pages, kv_heads = digests.shape[:2]
    columns = table.shape[1]
    kind = q.dtype
    digests_at, digested = _digests_at(digests, kind, pages, kv_heads, dim)
    out = empty(rows, kv_heads if per_head else 1, columns, dtype=float32)
    _call(
        "hb_page_scores", _at(q, kind), digests_at, _rows_at(table, rows),
        _at(num_pages, int32, rows), _at(budgets, int32, rows), out.data_ptr(),
        rows, columns, table.stride(0), pages, _type(kind), kv_heads, _group(heads, kv_heads), dim,
        page_size, digested, AGGREGATES.index(aggregate), per_head, lib.isa_index(isa), *_team(), bound, scale,
    )  # fmt: skip
    return out


def select_pages(
    scores: Tensor, num_pages: Tensor, seq_lens: Tensor, budgets: Tensor, requests: Tensor,
    frame_of: Tensor | None, table: Tensor, page_size: int, sinks: int, recent: int, most: int,
    counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None,
) -> Selection:  # fmt: skip
    rows, lists, columns = scores.shape
    selected, listed = empty(4, rows, lists, most, dtype=int32), empty(4, rows, lists, dtype=int32)
    request_count, frame_columns = frame_of.shape if frame_of is not None else (0, 0)
    _call(
        "hb_select_pages", _at(scores, float32), _at(num_pages, int32, rows), _at(seq_lens, int32, rows),
        _at(budgets, int32, rows), _at(requests, int32, rows), _at(frame_of, int32) if frame_of is not None else 0,
        _rows_at(table, rows, columns), _counters(counters), selected.data_ptr(), listed.data_ptr(),
        rows, lists, columns, table.stride(0), request_count, frame_columns, page_size, sinks, recent, most, *_team(),
    )  # fmt: skip
    pages, frames, missing, absent = selected.unbind()
    pages_listed, frames_listed, tokens, missing_listed = listed.unbind()
    if mailbox is not None:
        missing = mailbox[0][:rows].copy_(missing)
        mailbox[1][:rows].copy_(missing_listed)
    return Selection(pages, pages_listed, frames, frames_listed, tokens, missing, absent, missing_listed)


def match_labels(
    q: Tensor, labels: Tensor, weights: Tensor, thresholds: Tensor, requests: Tensor, num_pages: Tensor,
    budgets: Tensor, aggregate: str, counters: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, heads, dim = q.shape
    kv_heads, kind = len(thresholds), q.dtype
    missed = empty(rows, kv_heads, dtype=int32)
    _call(
        "hb_match_labels", _at(q, kind), _at(labels, kind, len(labels) * heads * dim), _at(weights, float32, heads),
        _at(thresholds, float32), _at(requests, int32, rows), _at(num_pages, int32, rows), _at(budgets, int32, rows),
        _counters(counters), missed.data_ptr(), rows, len(labels), _type(kind), kv_heads, _group(heads, kv_heads), dim,
        SIMILARITIES.index(aggregate), lib.isa_index(None), *_team(),
    )  # fmt: skip
    return missed


def union_pages(absent: Tensor, listed: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, lists, k = absent.shape
    columns = scores.shape[2]
    most = min(lists * k, columns)
    pages, count = empty(rows, 1, most, dtype=int32), empty(rows, 1, dtype=int32)
    best = empty(rows, 1, columns, dtype=float32)
    _call(
        "hb_union_pages", _at(absent, int32), _at(listed, int32, rows * lists),
        _at(scores, float32, rows * lists * columns), pages.data_ptr(), count.data_ptr(), best.data_ptr(),
        rows, lists, k, columns, most, *_team(),
    )  # fmt: skip
    return pages, count, best


def paged_partial(
    q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor, scale: float, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """Does not cut: of several parts the first is the whole list, the others are empty."""
    rows, heads, dim = q.shape
    store = _paged(kv)
    row_stride, list_stride = _list_strides(ids, rows)
    _, lists, n = ids.shape
    if dim != store[5]:
        raise ValueError(f"queries of {dim} channels do not fit pages of {store[5]}")
    if lists != 1 and lists != store[3]:
        raise ValueError(f"lists must be 1 or one per KV head ({store[3]}), not {lists}")
    out, lse = empty(rows, heads, 1, dim, dtype=float32), empty(rows, heads, 1, dtype=float32)
    _call(
        "hb_paged_partial", *store, _at(q, kv.dtype), ids.data_ptr(), _at(tokens, int32, rows * lists),
        out.data_ptr(), lse.data_ptr(), rows, lists, n, row_stride, list_stride, _group(heads, store[3]),
        lib.isa_index(None), *_team(), scale,
    )  # fmt: skip
    if parts > 1:
        out = torch.nn.functional.pad(out, (0, 0, 0, parts - 1))
        lse = torch.nn.functional.pad(lse, (0, parts - 1), value=float("-inf"))
    return out, lse


def parts_for(rows: int, kv_heads: int, most_tokens: int, processors: int) -> int:
    """Threads share a list without parts."""
    return 1


def merge_partials(
    out: Tensor, lse: Tensor, other: tuple[Tensor, Tensor] | None = None, dtype: torch.dtype = torch.float32,
    sinks: Tensor | None = None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, heads, parts, dim = out.shape
    items = rows * heads
    out = out.float()
    merged, merged_lse = (
        empty(rows, heads, dim, dtype=dtype) if into is None else into,
        empty(rows, heads, dtype=float32),
    )
    others = (0, 0)
    if other is not None:
        there = other[0].float()  # kept until the call is over
        others = _at(there, float32, items * dim), _at(other[1], float32, items)
    _call(
        "hb_merge_partials", _at(out, float32), _at(lse, float32, items * parts), *others,
        0 if sinks is None else _at(sinks, float32, heads), _at(merged, dtype, items * dim), merged_lse.data_ptr(),
        rows, heads, parts, dim, _type(dtype), lib.isa_index(None), *_team(),
    )  # fmt: skip
    return merged, merged_lse


def attend_prompt(
    q: Tensor, kv: Tensor, pages: Tensor, seq_len: int, scale: float, window: int | None, sinks: Tensor | None,
    out: Tensor, isa: str | None = None,
) -> None:  # fmt: skip
    """Exact causal attention of a prompt's newest tokens over pages in place, which have their keys and values already.

    Args:
        q: ``[tokens, heads, head_dim]`` of the cache's type, rows may lie apart; the last of ``seq_len`` tokens.
        kv: ``[pages, kv_heads, 2, page_size, head_dim]``.
        pages: ``[n]`` int32 of the sequence; those that no window reaches are not looked at.
        window: tokens that each sees at most, itself included; None: all.
        sinks: ``[heads]`` fp32 (`attention.partial.with_sinks`), or None.
        out: as ``q``; written.
    """
    tokens, heads, dim = q.shape
    store = _paged(kv)
    if dim != store[5]:
        raise ValueError(f"queries of {dim} channels do not fit pages of {store[5]}")
    if out.shape != q.shape:
        raise ValueError(f"out must be {tuple(q.shape)} as the queries, not {tuple(out.shape)}")
    _call(
        "hb_attend_prompt", *store, _tokens_at(q, kv.dtype, tokens, heads * dim), _at(pages, int32),
        0 if sinks is None else _at(sinks, float32, heads), _tokens_at(out, kv.dtype, tokens, heads * dim),
        tokens, seq_len, pages.numel(), _group(heads, store[3]), window or 0, q.stride(0), out.stride(0),
        lib.isa_index(isa), *_team(), scale,
    )  # fmt: skip


def page_weights(
    q: Tensor, kv: Tensor, ids: Tensor, places: Tensor, tokens: Tensor, lse: Tensor, average: Tensor,
    scale: float, alpha: float, largest: bool,
) -> None:  # fmt: skip
    rows, heads, dim = q.shape
    store = _paged(kv)
    (row_stride, _), (place_stride, _) = _list_strides(ids, rows), _list_strides(places, rows)
    if dim != store[5]:
        raise ValueError(f"queries of {dim} channels do not fit pages of {store[5]}")
    _call(
        "hb_page_weights", *store, _at(q, kv.dtype), ids.data_ptr(), places.data_ptr(), _at(tokens, int32, rows),
        _at(lse, float32, rows * heads), _at(average, float32, len(average) * store[3] * store[4]), rows, ids.shape[2],
        row_stride, place_stride, len(average), _group(heads, store[3]), largest, lib.isa_index(None), *_team(), scale,
        alpha,
    )  # fmt: skip


def note_scores(
    maps: Maps, scores: Tensor, num_pages: Tensor, budgets: Tensor, requests: Tensor, sinks: int, recent: int
) -> None:
    rows, lists, columns = scores.shape
    _call(
        "hb_note_scores", *_maps(maps), _at(scores, float32), _at(num_pages, int32, rows), _at(budgets, int32, rows),
        _at(requests, int32, rows), rows, lists, columns, sinks, recent,
    )  # fmt: skip


def plan_recall(
    maps: Maps, copies: Copies, scores: Tensor, table: Tensor, selected: tuple[Tensor, Tensor],
    absent: tuple[Tensor, Tensor], num_pages: Tensor, budgets: Tensor, requests: Tensor, generations: Tensor,
    ages: Tensor, sinks: int, recent: int, interval: int, phase: int, keep: Tensor, counters: Tensor | None = None,
) -> None:  # fmt: skip
    note_scores(maps, scores, num_pages, budgets, requests, sinks, recent)
    rows, _, columns = scores.shape
    _, lists, k = selected[0].shape
    n = absent[0].shape[2]
    places = _maps(maps)
    room = _copies(copies)
    if room[6] < rows or keep.numel() < rows * places[6]:
        raise ValueError(f"copies of {room[6]} rows and scratch of {keep.numel()} are too small for {rows} rows")
    _call(
        "hb_plan_recall", *places, *room, _at(scores, float32, rows * columns), _rows_at(table, rows, columns),
        _at(selected[0], int32, rows * lists * k), _at(selected[1], int32, rows * lists),
        _at(absent[0], int32, rows * n), _at(absent[1], int32, rows), _at(num_pages, int32, rows),
        _at(requests, int32, rows), _at(generations, int32, rows), _at(ages, int32, rows), _at(keep, int32),
        _counters(counters), rows, columns, table.stride(0), lists, k, n, interval, phase,
    )  # fmt: skip


def copy_pages(host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor) -> None:
    pages, count = host.shape[0], frames.shape[0]
    if not pages:
        return
    page = host.numel() // pages  # elements
    n = frame_ids.numel()
    _call(
        "hb_copy_pages", _at(host, host.dtype), _at(frames, host.dtype, count * page), _at(host_pages, int32, n),
        _at(frame_ids, int32), n, page * host.element_size(), pages, count, *_team(),
    )  # fmt: skip


def commit_pages(maps: Maps, copies: Copies, generations: Tensor) -> None:
    places, room = _maps(maps), _copies(copies)
    if copies.requests.numel() != places[3] * room[6]:
        raise ValueError(f"copies of {len(copies.frames)} layers do not fit maps of {places[3]}")
    _call("hb_commit_pages", *places, *room, _at(generations, int64, places[4]))


def open_pages(maps: Maps, requests: Tensor, pages: Tensor, positions: Tensor, page_size: int, sinks: int) -> None:
    rows = requests.numel()
    _call(
        "hb_open_pages", *_maps(maps), _at(requests, int32), _at(pages, int32, rows), _at(positions, int32, rows),
        rows, page_size, sinks,
    )  # fmt: skip


def take_sample(
    q: Tensor, predicted: Tensor | None, pages: Tensor, listed: Tensor, table: Tensor, num_pages: Tensor,
    wanted: Tensor, number: Tensor, arrived: Tensor, into: Sample,
) -> None:  # fmt: skip
    # A few copies of torch's.
    oracle.take_sample(q, predicted, pages, listed, table, num_pages, wanted, number, arrived, into)


# --- arguments, in the order of src/api.h ---


def _call(name: str, *values: Any) -> None:
    if getattr(lib.native(), name)(lib.OPERATIONS[name].pack(*values)):
        lib.check(lib.ERROR)


def _at(x: Tensor, dtype: torch.dtype, count: int = -1) -> int:
    """Address of a contiguous tensor of ``count`` elements, -1: of any number."""
    if x.dtype is not dtype or (count >= 0 and x.numel() != count) or not x.is_contiguous():
        wanted = f"contiguous {dtype}" + (f" of {count} elements" if count >= 0 else "")
        raise ValueError(f"an argument must be {wanted}, not {x.dtype} {tuple(x.shape)} with strides {x.stride()}")
    return x.data_ptr()


def _digests_at(x: Tensor | None, dtype: torch.dtype, pages: int, kv_heads: int, dim: int) -> tuple[int, int]:
    """Address of digests, and their kind."""
    if x is None:
        return 0, 0
    kind = digest_kind(x, dim)
    row = {"minmax": 2 * dim, "codes": 4 * dim, "bytes": byte_digests.row(dim)}[kind]
    return _at(x, dtype if kind == "minmax" else torch.uint8, pages * kv_heads * row), DIGESTS.index(kind)


def _tokens_at(x: Tensor, dtype: torch.dtype, rows: int, width: int) -> int:
    """Address of ``[rows, heads, head_dim]``, ``width`` elements a row, whose rows may lie apart."""
    if x.dtype is not dtype or x.numel() != rows * width or not (rows == 0 or x[0].is_contiguous()):
        raise ValueError(
            f"new tokens must be {dtype}, {rows} contiguous rows of {width} elements, not {x.dtype} {tuple(x.shape)} "
            f"with strides {x.stride()}"
        )
    return x.data_ptr()


def _rows_at(table: Tensor, rows: int, columns: int = -1) -> int:
    """Address of ``[rows, columns]`` int32, -1: of any number, with contiguous rows."""
    shape = table.shape
    if (
        table.dtype is not int32
        or shape[0] != rows
        or (columns >= 0 and shape[1] != columns)
        or (table.stride(1) != 1 and shape[1] > 1)
    ):
        raise ValueError(
            f"the table must be int32 [{rows}, {columns if columns >= 0 else 'columns'}] with contiguous rows, not "
            f"{table.dtype} {tuple(shape)} with strides {table.stride()}"
        )
    return table.data_ptr()


def _list_strides(ids: Tensor, rows: int) -> tuple[int, int]:
    row, one_list, last = ids.stride()
    if ids.dtype is not int32 or ids.shape[0] != rows or (last != 1 and ids.shape[2] > 1):
        raise ValueError(
            f"page lists must be int32 of {rows} rows with contiguous lists, not {ids.dtype} {tuple(ids.shape)} with "
            f"strides {ids.stride()}"
        )
    return row, one_list


def _counters(counters: Tensor | None) -> int:
    return _at(counters, int64, _COUNTERS) if counters is not None else 0


def _type(dtype: torch.dtype) -> int:
    if dtype not in lib.DTYPES:
        raise ValueError(f"elements must be bfloat16, float16 or float32, not {dtype}")
    return lib.DTYPES[dtype]


def _group(heads: int, kv_heads: int) -> int:
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} KV heads")
    return heads // kv_heads


def _paged(kv: Tensor) -> tuple[int, int, int, int, int, int]:
    pages, kv_heads, two, page_size, dim = kv.shape
    if two != 2:
        raise ValueError(f"pages must be [pages, kv_heads, 2, page_size, head_dim], not {tuple(kv.shape)}")
    return _at(kv, kv.dtype), pages, _type(kv.dtype), kv_heads, page_size, dim


def _team() -> tuple[int, int]:
    return openmp_entry() or 0, torch.get_num_threads()


def _maps(maps: Maps) -> tuple[int, int, int, int, int, int, int]:
    """Of one layer, or of several."""
    frame_of, page_of, importance = maps
    *layers, requests, columns = frame_of.shape
    count = layers[0] if layers else 1
    every = page_of.numel()
    frames = every // (count * requests) if requests else 0
    return (
        _at(frame_of, int32), _at(page_of, int32, count * requests * frames), _at(importance, float32, every),
        count, requests, columns, frames,
    )  # fmt: skip


def _copies(copies: Copies) -> tuple[int, int, int, int, int, int, int, int]:
    frames, host_pages, pages, importance, requests, started = copies
    *_, rows, most = frames.shape
    every, lines = frames.numel(), requests.numel()
    return (
        _at(frames, int32), _at(host_pages, int32, every), _at(pages, int32, every), _at(importance, float32, every),
        _at(requests, int32), _at(started, int64, lines), rows, most,
    )  # fmt: skip
