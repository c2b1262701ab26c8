"""All kernels' launchers: what `hybrid_backend.kernels.triton` offers once Triton is wanted."""

from __future__ import annotations

from hybrid_backend.kernels.triton.decode import page_weights, paged_partial, splits_for
from hybrid_backend.kernels.triton.digests import build_digests
from hybrid_backend.kernels.triton.merge import merge_partials
from hybrid_backend.kernels.triton.recall import copy_pages
from hybrid_backend.kernels.triton.residency import commit_pages, note_scores, open_pages, plan_recall
from hybrid_backend.kernels.triton.scores import page_scores
from hybrid_backend.kernels.triton.select import SelectedPages, select_pages, union_pages
from hybrid_backend.kernels.triton.signal import ask, await_answer
from hybrid_backend.kernels.triton.tokens import append_tokens

__all__ = [
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
