"""Triton kernels of the device tier, each with a plain-torch oracle and a test under Triton's interpreter.

Shapes that all of them share: pages ``[pages, kv_heads, 2 (K, V), page_size, head_dim]``, digests
``[pages, kv_heads, 2 (max, min), head_dim]``, lists of pages ``[rows, 1 | kv_heads, k]`` int32 (one per row, or one per
KV head) with the number of entries that count beside them. Nothing here synchronises or reads a tensor's values on the
host, so every call can be captured in a CUDA graph: what varies from step to step lies in tensors, and rows of a padded
batch are rows without pages.
"""

from __future__ import annotations

from hybrid_backend.kernels.triton.decode import page_weights, paged_partial, splits_for
from hybrid_backend.kernels.triton.digests import build_digests
from hybrid_backend.kernels.triton.merge import merge_partials
from hybrid_backend.kernels.triton.recall import copy_pages
from hybrid_backend.kernels.triton.residency import Copies, Maps, commit_pages, note_scores, open_pages, plan_recall
from hybrid_backend.kernels.triton.scores import page_scores
from hybrid_backend.kernels.triton.select import SelectedPages, select_pages, union_pages
from hybrid_backend.kernels.triton.signal import ask, await_answer
from hybrid_backend.kernels.triton.tokens import append_tokens

__all__ = [
    "Copies",
    "Maps",
    "SelectedPages",
    "append_tokens",
    "ask",
    "await_answer",
    "build_digests",
    "commit_pages",
    "copy_pages",
    "merge_partials",
    "note_scores",
    "open_pages",
    "page_scores",
    "page_weights",
    "paged_partial",
    "plan_recall",
    "select_pages",
    "splits_for",
    "union_pages",
]
