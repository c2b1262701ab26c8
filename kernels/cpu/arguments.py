"""Arguments of the operations for the library: tensors are checked, and become addresses and numbers.

Checks cover what memory safety depends on: dtypes, sizes and contiguity. The library checks ids. Functions return the
members of the structures in src/api_operations.h, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, float32, int8, int32, int64

from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.decode import openmp_entry
from hybrid_backend.kernels.cpu.interface import PACKERS
from hybrid_backend.kernels.digest_format import digest_format_of
from hybrid_backend.kernels.kv_format import head_dim_of
from hybrid_backend.kernels.operations import Copies, Counters, Maps, Reuse

_COUNTERS = len(Counters._fields)


def call(name: str, *values: Any) -> None:
    """Call an operation of the library.

    Args:
        name: name of the operation (src/api_operations.h).
        values: members of its structure, in order.

    Raises:
        WorkerError: the operation failed.
    """
    function, pack = _operation(name)
    if function(pack(*values)):
        lib.check(lib.ERROR)


@cache
def _operation(name: str) -> tuple[Callable[[bytes], int], Callable[..., bytes]]:
    """Return an operation of the library, and the function that packs its arguments."""
    return getattr(lib.native(), name), PACKERS[name].pack


def address(x: Tensor, dtype: torch.dtype, count: int = -1) -> int:
    """Return the address of a contiguous tensor of ``count`` elements; -1: any number.

    Raises:
        ValueError: another dtype or number, or not contiguous.
    """
    if x.dtype is not dtype or (count >= 0 and x.numel() != count) or not x.is_contiguous():
        expected = f"contiguous {dtype}" + (f" of {count} elements" if count >= 0 else "")
        raise ValueError(f"an argument must be {expected}, not {x.dtype} {tuple(x.shape)} with strides {x.stride()}")
    return x.data_ptr()


def digests_address(x: Tensor | None, dtype: torch.dtype, pages: int, kv_heads: int, dim: int) -> tuple[int, int]:
    """Return the address of digests and the number of their format.

    Raises:
        ValueError: another dtype or size, or not contiguous.
    """
    if x is None:
        return 0, 0
    digest_format = digest_format_of(x, dim)
    count = prod(digest_format.shape(pages, kv_heads, dim))
    return address(x, digest_format.dtype(dtype), count), digest_format.number


def tokens_address(x: Tensor, dtype: torch.dtype, rows: int, width: int) -> int:
    """Return the address of ``[rows, heads, head_dim]`` with ``width`` elements a row and any row stride.

    Raises:
        ValueError: another dtype or size, or rows that are not contiguous.
    """
    if x.dtype is not dtype or x.numel() != rows * width or not (rows == 0 or x[0].is_contiguous()):
        raise ValueError(
            f"new tokens must be {dtype}, {rows} contiguous rows of {width} elements, not {x.dtype} {tuple(x.shape)} "
            f"with strides {x.stride()}"
        )
    return x.data_ptr()


def rows_address(table: Tensor, rows: int, columns: int = -1) -> int:
    """Return the address of a block table ``[rows, columns]`` int32 with contiguous rows; -1: any number of columns.

    Raises:
        ValueError: another dtype or shape, or rows that are not contiguous.
    """
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


def list_strides(ids: Tensor, rows: int) -> tuple[int, int]:
    """Return the strides of the rows and of the lists of page lists, in elements.

    Raises:
        ValueError: another dtype or number of rows, or lists that are not contiguous.
    """
    row, one_list, last = ids.stride()
    if ids.dtype is not int32 or ids.shape[0] != rows or (last != 1 and ids.shape[2] > 1):
        raise ValueError(
            f"page lists must be int32 of {rows} rows with contiguous lists, not {ids.dtype} {tuple(ids.shape)} with "
            f"strides {ids.stride()}"
        )
    return row, one_list


def counters_address(counters: Tensor | None) -> int:
    """Return the address of a layer's counters; 0 without counters."""
    return address(counters, int64, _COUNTERS) if counters is not None else 0


def reuse_arguments(reuse: Reuse | None, rows: int, lists: int, most: int = 0) -> tuple[int, int, int, int]:
    """Return the members of ``hb_reuse``: epochs, epochs of the lists, pages, listed pages; zeros without ``reuse``.

    ``most`` is the number of pages that a list holds; 0: the pages are not read.
    """
    if reuse is None:
        return 0, 0, 0, 0
    pages = address(reuse.pages[:rows], int32, rows * lists * most) if most else 0
    return (
        address(reuse.epochs[:rows], int32, rows),
        address(reuse.list_epochs[:rows], int32, rows * lists),
        pages,
        address(reuse.pages_listed[:rows], int32, rows * lists),
    )


def group_size(heads: int, kv_heads: int) -> int:
    """Return the query heads per KV head.

    Raises:
        ValueError: the query heads do not divide among the KV heads.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} KV heads")
    return heads // kv_heads


def paged_arguments(kv: Tensor, dtype: torch.dtype) -> tuple[int, int, int, int, int, int, int]:
    """Return the members of ``hb_paged``: address, pages, element type, KV heads, page size, head_dim, encoding.

    Args:
        kv: pages.
        dtype: the model's: that of queries and new tokens, and of ``kv`` too unless that is in 8 bits.

    Raises:
        ValueError: another shape or dtype, or not contiguous.
    """
    pages, kv_heads, two, page_size, _ = kv.shape
    if two != 2:
        raise ValueError(f"pages must be [pages, kv_heads, 2, page_size, head_dim], not {tuple(kv.shape)}")
    stored = kv.dtype if kv.dtype is int8 else dtype
    number, encoding = lib.dtype_number(dtype), lib.kv_encoding(stored)
    return address(kv, stored), pages, number, kv_heads, page_size, head_dim_of(kv), encoding


def team_arguments() -> tuple[int, int]:
    """Return the members of ``hb_team``: the engine's OpenMP entry (0: none), and its threads."""
    return openmp_entry() or 0, torch.get_num_threads()


def maps_arguments(maps: Maps) -> tuple[int, int, int, int, int, int, int]:
    """Return the members of ``hb_maps`` for the maps of one layer or of several layers.

    Raises:
        ValueError: tensors that do not fit together.
    """
    frame_of, page_of, importance = maps
    *layers, requests, columns = frame_of.shape
    count = layers[0] if layers else 1
    size = page_of.numel()
    frames = size // (count * requests) if requests else 0
    return (
        address(frame_of, int32), address(page_of, int32, count * requests * frames),
        address(importance, float32, size), count, requests, columns, frames,
    )  # fmt: skip


def copies_arguments(copies: Copies) -> tuple[int, int, int, int, int, int, int, int]:
    """Return the members of ``hb_copies``.

    Raises:
        ValueError: tensors that do not fit together.
    """
    frames, host_pages, pages, importance, requests, started = copies
    *_, rows, most = frames.shape
    size, lines = frames.numel(), requests.numel()
    return (
        address(frames, int32), address(host_pages, int32, size), address(pages, int32, size),
        address(importance, float32, size),
        address(requests, int32), address(started, int64, lines), rows, most,
    )  # fmt: skip
