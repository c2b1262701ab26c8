"""All operations of a decode step on a GPU, or under Triton's interpreter: a module that is an `Operations`."""

from __future__ import annotations

from hybrid_backend.kernels.triton.append import append_tokens, build_digests, extend_digests, store_tokens
from hybrid_backend.kernels.triton.attend import merge_partials, page_weights, paged_partial, parts_for
from hybrid_backend.kernels.triton.heads import plan_load, plan_stream
from hybrid_backend.kernels.triton.labels import match_labels
from hybrid_backend.kernels.triton.residency import commit_pages, copy_pages, note_scores, open_pages, plan_recall
from hybrid_backend.kernels.triton.samples import take_sample
from hybrid_backend.kernels.triton.scores import page_scores
from hybrid_backend.kernels.triton.select import select_pages, union_pages

__all__ = [
    "append_tokens",
    "build_digests",
    "commit_pages",
    "copy_pages",
    "extend_digests",
    "match_labels",
    "merge_partials",
    "note_scores",
    "open_pages",
    "page_scores",
    "page_weights",
    "paged_partial",
    "parts_for",
    "plan_load",
    "plan_recall",
    "plan_stream",
    "select_pages",
    "store_tokens",
    "take_sample",
    "union_pages",
]
