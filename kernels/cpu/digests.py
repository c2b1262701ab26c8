"""Page digests on the CPU, in bytes too: what `Decoder` scores and selects by. (`operations` has what methods use.)"""

from __future__ import annotations

import ctypes as C

import torch
from torch import Tensor

from hybrid_backend.kernels.cpu import library as lib


def scores(
    q: Tensor,
    digests: Tensor,
    page_table: Tensor,
    *,
    per_head: bool = False,
    aggregate: str = "sum",
    bound: float = 1.0,
    isa: str | None = None,
) -> Tensor:
    """Quest's estimates of the largest logit in each page, not scaled, aggregated over query heads.

    Args:
        q: ``[rows, heads, head_dim]``.
        digests: ``[pages, kv_heads, 2, head_dim]``.
        page_table: ``[rows, columns]`` page ids.
        per_head: one list per KV head instead of one per row.
        aggregate: ``sum`` or ``max`` over the heads of a group.
        bound: between the middle of what the digest allows (0) and its upper end (1: Quest).

    Returns:
        ``[rows, 1 | kv_heads, columns]`` fp32.
    """
    rows, heads, dim = q.shape
    if aggregate not in ("sum", "max"):
        raise ValueError(f"aggregate must be sum or max, not {aggregate!r}")
    q = q.to(digests.dtype)
    if q.stride(2) != 1:
        q = q.contiguous()
    kv_heads = digests.shape[1]
    model = lib.model_of(digests.dtype, kv_heads, heads, dim, 16, 1.0, bound)
    store, table = lib.digests_of(digests), page_table.long().contiguous()
    out = torch.empty(rows, kv_heads if per_head else 1, table.shape[1], dtype=torch.float32)
    size = q.element_size()
    lib.check(
        lib.native().hb_scores(
            C.byref(model), C.byref(store), digests.shape[0], q.data_ptr(), q.stride(0) * size, q.stride(1) * size,
            rows, table.shape[1], table.data_ptr(), table.stride(0), per_head, aggregate == "max", out.data_ptr(),
            lib.isa_index(isa),
        )
    )  # fmt: skip
    return out


def quantized_like(digests: Tensor) -> Tensor:
    """Memory for the same digests in bytes: ``[pages, row]`` uint8, not yet up to date with them (`quantize`).

    Scoring from bytes reads half as much as from bf16; each (page, KV head, max or min) has a scale of its own.
    """
    pages, kv_heads, _, dim = digests.shape
    return torch.full((pages, lib.byte_row(kv_heads, dim)), 0, dtype=torch.uint8)


def quantize(quantized: Tensor, digests: Tensor, pages: Tensor) -> None:
    """Bring the rows of ``pages`` (``[n]`` int64) up to date. To be called when the digests of whole pages are new;
    `Decoder` does it itself for pages that it fills. What is not finite in a digest counts as 0."""
    model, store = _model(digests), lib.digests_of(digests)
    rows = lib.bytes_of(quantized, digests.shape[1], digests.shape[3])
    pages = pages.long().contiguous()
    lib.check(
        lib.native().hb_quantize(
            C.byref(model), C.byref(store), C.byref(rows), digests.shape[0], len(pages), pages.data_ptr()
        )
    )


def byte_scores(
    q: Tensor, quantized: Tensor, kv_heads: int, page_table: Tensor, *, bound: float = 1.0, isa: str | None = None
) -> Tensor:
    """`scores` per row, summed over all heads, from bytes: ``[rows, 1, columns]`` fp32, to about 1 %."""
    rows, heads, dim = q.shape
    if q.stride(2) != 1:
        q = q.contiguous()
    model = lib.model_of(q.dtype, kv_heads, heads, dim, 16, 1.0, bound)
    store, table = lib.bytes_of(quantized, kv_heads, dim), page_table.long().contiguous()
    out = torch.empty(rows, 1, table.shape[1], dtype=torch.float32)
    size = q.element_size()
    lib.check(
        lib.native().hb_byte_scores(
            C.byref(model), C.byref(store), quantized.shape[0], q.data_ptr(), q.stride(0) * size, q.stride(1) * size,
            rows, table.shape[1], table.data_ptr(), table.stride(0), out.data_ptr(), lib.isa_index(isa),
        )
    )  # fmt: skip
    return out


def select(scores: Tensor, budget: int, sinks: int, recent: int) -> Tensor:
    """The ``budget`` best of ``scores`` (``[columns]`` fp32) as ascending int32 columns.

    The first ``sinks`` and the last ``recent`` are always among them; so are at least as many as those.
    """
    scores = scores.float().contiguous()
    out = torch.empty(len(scores), dtype=torch.int32)
    count = lib.native().hb_select(scores.data_ptr(), len(scores), budget, sinks, recent, out.data_ptr())
    return out[: lib.check(count)]


def _model(digests: Tensor, page_size: int = 16) -> lib.Model:
    return lib.model_of(digests.dtype, digests.shape[1], digests.shape[1], digests.shape[3], page_size, 1.0)
