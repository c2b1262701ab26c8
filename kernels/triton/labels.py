"""CLO's lookup: similarity of each KV head's query and the query that selected its cached pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_backend.kernels.operations import SIMILARITIES
from hybrid_backend.kernels.triton.common import kernel
from hybrid_backend.kernels.triton.counters import HITS, LOOKUPS


@triton.jit
def _scaled(x):
    """Divide rows by their largest magnitude, in fp32, so that no square overflows or vanishes."""
    x = x.to(tl.float32)
    top = tl.max(tl.abs(x), 1)
    return x / tl.where(top > 0, top, 1.0)[:, None]


@kernel("q", "labels")
def _match_kernel(q, labels, weights, thresholds, requests, num_pages, budgets, to_select, counters,
                  KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, HARMONIC: tl.constexpr,
                  BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    threshold = tl.load(thresholds + head)
    pages, miss = tl.load(num_pages + row), tl.zeros([], tl.int32)
    if (tl.load(budgets + row) < pages) & (threshold != float("-inf")):
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        offsets = (head * GROUP + g)[:, None] * DIM + d[None, :]
        inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
        label_rows = labels + tl.load(requests + row).to(tl.int64) * KV_HEADS * GROUP * DIM + offsets
        query = tl.load(q + row * KV_HEADS * GROUP * DIM + offsets, mask=inside, other=0.0)
        x, label = _scaled(query), _scaled(tl.load(label_rows, mask=inside, other=0.0))
        of_label = tl.sum(label * label, 1)
        lengths = tl.sqrt_rn(tl.sum(x * x, 1) * of_label)
        similar = tl.where(lengths == 0, 0.0, tl.div_rn(tl.sum(x * label, 1), tl.where(lengths == 0, 1.0, lengths)))

        s = tl.load(weights + head * GROUP + g, mask=g < GROUP, other=0.0)
        s = tl.where(tl.max(s, 0) > 0, s, (g < GROUP).to(tl.float32))
        similarity = tl.min(tl.where(s > 0, similar, float("inf")), 0)
        if HARMONIC:
            inverse = tl.sum(tl.div_rn(s, tl.where(similar > 0, similar, 1.0)), 0)
            similarity = tl.where(similarity > 0, tl.div_rn(tl.sum(s, 0), inverse), similarity)
        odd = tl.sum((similar != similar).to(tl.int32), 0)
        hit = (similarity >= threshold) & (odd == 0) & (tl.sum(of_label, 0) != 0)
        miss += 1 - hit.to(tl.int32)
        tl.debug_barrier()  # All warps must have read the label before one overwrites it.
        if miss > 0:
            tl.store(label_rows, query, mask=inside)
        if counters is not None:
            tl.atomic_add(counters + LOOKUPS, tl.full([], 1, tl.int64), sem="relaxed")
            tl.atomic_add(counters + HITS, hit.to(tl.int64), sem="relaxed")
    tl.store(to_select + row * KV_HEADS + head, tl.where(miss > 0, pages, 0))


def match_labels(
    q: Tensor, labels: Tensor, weights: Tensor, thresholds: Tensor, requests: Tensor, num_pages: Tensor,
    budgets: Tensor, aggregate: str, counters: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, heads, dim = q.shape
    kv_heads = len(thresholds)
    group = heads // kv_heads
    to_select = num_pages.new_empty(rows, kv_heads)
    is_harmonic = SIMILARITIES.index(aggregate) == 0
    if rows:
        _match_kernel[(rows, kv_heads)](
            q, labels, weights, thresholds, requests, num_pages, budgets, to_select, counters,
            kv_heads, group, dim, is_harmonic, triton.next_power_of_2(group), triton.next_power_of_2(dim),
        )  # fmt: skip
    return to_select
