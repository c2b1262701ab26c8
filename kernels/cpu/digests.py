"""Byte digests as the native decoder reads them (`Decoder`): the KV heads of a page in one row."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hybrid_backend.kernels import byte_digests
from hybrid_backend.kernels.cpu import library as lib


def empty_byte_digests(digests: Tensor) -> Tensor:
    """Allocate byte digests ``[pages, row]`` uint8 for the pages of ``digests``; `write_byte_digests` fills them.

    Scoring from bytes reads half as much as from bf16. Maxima and minima of each (page, KV head) have a scale of their
    own.
    """
    pages, kv_heads, _, dim = digests.shape
    return torch.zeros(pages, byte_digests.page_row(kv_heads, dim), dtype=torch.uint8)


def write_byte_digests(copy: Tensor, digests: Tensor, pages: Tensor) -> None:
    """Write the byte digests of pages, when the digests of whole pages are new.

    `Decoder` does this itself for pages that it fills. Values that are not finite count as 0.

    Args:
        copy: byte digests of the layer (`empty_byte_digests`), updated in place.
        digests: ``[pages, kv_heads, 2, head_dim]``.
        pages: ``[n]`` page ids.

    Raises:
        WorkerError: a page id that the layer lacks.
    """
    _, kv_heads, _, dim = digests.shape
    model = lib.model_of(digests.dtype, kv_heads, kv_heads, dim, page_size=16, scale=1.0)
    store, rows = lib.digests_of(digests), lib.byte_digests_of(copy, kv_heads, dim)
    pages = pages.long().contiguous()
    lib.check(
        lib.native().hb_write_byte_digests(
            ctypes.byref(model),
            ctypes.byref(store),
            ctypes.byref(rows),
            digests.shape[0],
            len(pages),
            pages.data_ptr(),
        )
    )
