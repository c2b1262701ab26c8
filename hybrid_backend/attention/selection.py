"""Which pages a decoding sequence attends: Quest scores, top-k under a budget, forced pages."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.config import SelectionConfig


def page_scores(
    q: Tensor,
    digests: Tensor,
    page_table: Tensor,
    num_pages: Tensor,
    how: SelectionConfig,
    scale: float,
) -> Tensor:
    """Estimates of the largest attention logit in each page (Quest, section 3.2), combined over query heads.

    Quest's upper bound is ``sum_d max(q*min, q*max) = q.(max+min)/2 + |q|.(max-min)/2``: the middle of what the digest
    allows and half of its width. All channels are never at their ends together, so ``how.bound`` of the half-width is
    taken (1: Quest). That is two dot products; and because a sum over heads commutes with them, ``aggregate: sum`` per
    layer costs one dot product of ``2 * kv_heads * head_dim`` per page. But in a sum of logits a head that looks
    everywhere outvotes one that looks for a single page; ``softmax`` adds up shares instead: the softmax of each head's
    scores over all pages but the growing one.

    Args:
        q: ``[rows, heads, head_dim]``.
        digests: ``[pages, kv_heads, 2, head_dim]``.
        page_table: ``[rows, columns]`` host page ids.
        num_pages: ``[rows]`` pages of each sequence.
        scale: of the attention's softmax.

    Returns:
        ``[rows, 1 | kv_heads, columns]`` fp32; sums and maxima are not scaled.
    """
    rows, heads, dim = q.shape
    kv_heads = digests.shape[1]
    columns = page_table.shape[1]
    grouped = q.float().view(rows, kv_heads, heads // kv_heads, dim)
    half = how.bound * grouped.abs()
    to_max, to_min = (grouped + half) / 2, (grouped - half) / 2
    listed = digests.index_select(0, page_table.flatten()).float()
    listed = listed.view(rows, columns, kv_heads, 2 * dim)
    if how.granularity == "layer" and how.aggregate == "sum":
        weights = torch.cat([to_max.sum(2), to_min.sum(2)], -1).view(rows, -1, 1)
        return torch.bmm(listed.view(rows, columns, -1), weights).transpose(1, 2)
    weights = torch.cat([to_max, to_min], -1)  # [rows, kv_heads, group, 2 * dim]
    scores = torch.einsum("rhgd,rphd->rhgp", weights, listed)
    if how.aggregate == "softmax":
        last = (torch.arange(columns) >= (num_pages - 1)[:, None])[:, None, None]
        scores = (scores * scale).masked_fill(last, float("-inf")).softmax(-1).nan_to_num(0.0)
    lists = scores.amax(2) if how.aggregate == "max" else scores.sum(2)
    return lists.sum(1, keepdim=True) if how.granularity == "layer" else lists


def force_pages(scores: Tensor, num_pages: Tensor, sinks: int, recent: int) -> Tensor:
    """First and recent pages get +inf (always selected), columns beyond the sequence -inf (never).

    ``scores``: ``[rows, lists, columns]``; ``num_pages``: ``[rows]``.
    """
    column = torch.arange(scores.shape[2])[None, None]
    count = num_pages[:, None, None]
    forced = (column < sinks) | (column >= count - recent)
    return scores.masked_fill(forced, float("inf")).masked_fill(column >= count, float("-inf"))


def select_pages(scores: Tensor, budget: Tensor) -> Tensor:
    """The ``budget[row]`` best columns of each list, in ascending order, padding (-1) last.

    Args:
        scores: ``[rows, lists, columns]`` after `force_pages`.
        budget: ``[rows]`` pages.

    Returns:
        ``[rows, lists, min(max(budget), columns)]`` int64 logical pages.
    """
    columns = scores.shape[2]
    k = min(int(budget.max()), columns)
    best, index = scores.topk(k, -1)
    unwanted = (torch.arange(k)[None, None] >= budget[:, None, None]) | (best == float("-inf"))
    index = index.masked_fill(unwanted, columns).sort(-1).values
    return index.masked_fill(index == columns, -1)


def all_pages(num_pages: Tensor) -> Tensor:
    """``[rows, 1, max(num_pages)]``: every page of each row, padding (-1) last."""
    column = torch.arange(int(num_pages.max()))[None, None]
    return torch.where(column < num_pages[:, None, None], column, -1)


def compact(ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Move the kept entries of each list to its front, in order; the rest becomes -1.

    Returns ``(ids, order)``, both cut to the longest list; ``order`` gathers companions of ``ids`` the same way.
    """
    longest = int(keep.sum(-1).max()) if keep.numel() else 0
    order = keep.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :longest]
    return ids.gather(-1, order).masked_fill(~keep.gather(-1, order), -1), order
