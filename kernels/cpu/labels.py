"""The native operation over labels of the cached pages of KV heads (`kernels.contract.selection`)."""

from __future__ import annotations

from torch import Tensor, empty, float32, int32

from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.arguments import address, call, counters_address, group_size, team_arguments
from hybrid_backend.kernels.operations import SIMILARITIES


def match_labels(
    q: Tensor, labels: Tensor, weights: Tensor, thresholds: Tensor, requests: Tensor, num_pages: Tensor,
    budgets: Tensor, aggregate: str, counters: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, heads, dim = q.shape
    kv_heads, kind = len(thresholds), q.dtype
    missed = empty(rows, kv_heads, dtype=int32)
    call(
        "hb_match_labels", address(q, kind), address(labels, kind, len(labels) * heads * dim),
        address(weights, float32, heads),
        address(thresholds, float32), address(requests, int32, rows), address(num_pages, int32, rows),
        address(budgets, int32, rows),
        counters_address(counters), missed.data_ptr(), rows, len(labels), lib.dtype_number(kind), kv_heads,
        group_size(heads, kv_heads), dim,
        SIMILARITIES.index(aggregate), lib.isa_index(None), *team_arguments(),
    )  # fmt: skip
    return missed.mul_(num_pages[:, None])
