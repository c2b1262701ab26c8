"""The operations that a decode step is made of: their contract, which all implementations keep.

Three modules implement the contract: `oracle` (plain torch, for tests and for machines without a compiler),
`cpu.operations` (native C++) and `triton.operations` (a GPU, or Triton's interpreter). One contract suite,
tests/unit/operations, runs all of them over the same cases. A method is a sequence of operations, so the CPU tests
prove what a GPU launches.

Shapes: pages are ``[pages, kv_heads, 2 (K, V), page_size, head_dim]`` in the model's dtype. Digests are in one of the
formats of `digest_format`: ``[pages, kv_heads, 2 (max, min), head_dim]`` in the model's dtype, of the tokens written so
far; or, of whole pages only, ``[pages, kv_heads, row]`` uint8: codes (`codes`) or byte digests (`byte_digests`). Page
lists are ``[rows, 1 | kv_heads, n]`` int32, one per row or one per KV head, and come with their lengths. Log-sum-exp is
in natural log. Tensors are contiguous unless the contract says otherwise; returned tensors are new.

A row is one decoding sequence. It has the queries ``query_start[row]:query_start[row + 1]``, where ``query_start`` is
``[rows + 1]`` int32 on the host. Without ``query_start`` each row has one query, so that ``queries`` is ``rows``.
`oracle` takes any number of queries per row; C++ and Triton take one.

A *padding row* has no pages (``num_pages`` 0) and writes nowhere (its page is -1): nothing is selected, attended,
planned or opened for it, whatever its request index; its partial is empty (output 0, lse -inf). A NaN score counts as
-inf in all operations, and 0.0 equals -0.0. Values that change from step to step lie in tensors, and no operation reads
a tensor on the host or waits on the host, so that a CUDA graph can hold all of them.

A running request has an index. It owns the frames ``index``, ``index + n``, ``index + 2 n`` and so on of each layer,
where n requests may run. So a layer may have fewer frames than another one.
"""

from __future__ import annotations

from typing import Protocol

from hybrid_backend.kernels.contract.attention import AttentionOperations
from hybrid_backend.kernels.contract.buffers import (
    AGGREGATES,
    FAILED,
    NOWHERE,
    SIMILARITIES,
    AwaitedPages,
    Copies,
    Counters,
    Maps,
    Reuse,
    RowStates,
    Sample,
    Selection,
    StreamPlan,
    check_one_query,
)
from hybrid_backend.kernels.contract.heads import HeadOperations
from hybrid_backend.kernels.contract.judging import Judgement, JudgingOperations, LayerToJudge, PromptToJudge
from hybrid_backend.kernels.contract.residency import ResidencyOperations
from hybrid_backend.kernels.contract.selection import SelectionOperations
from hybrid_backend.kernels.contract.tokens import TokenOperations

__all__ = [
    "AGGREGATES",
    "FAILED",
    "NOWHERE",
    "SIMILARITIES",
    "AwaitedPages",
    "Copies",
    "Counters",
    "Judgement",
    "JudgingOperations",
    "LayerToJudge",
    "Maps",
    "Operations",
    "PromptToJudge",
    "Reuse",
    "RowStates",
    "Sample",
    "Selection",
    "StreamPlan",
    "check_one_query",
]


class Operations(
    TokenOperations, SelectionOperations, AttentionOperations, ResidencyOperations, HeadOperations, Protocol
):
    """All operations of a module that implements the contract."""
