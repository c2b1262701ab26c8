"""The part of the oracle for rows that attend the selection of an earlier step again (`operations.Reuse`)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels.operations import Reuse


def scores_again(reuse: Reuse, scores: Tensor, num_pages: Tensor) -> Tensor:
    """Store the new ``scores`` of the rows that select again, and return the stored scores of all rows."""
    stored = reuse.scores[: len(scores)]
    return stored.copy_(torch.where(_is_reused(reuse, num_pages)[:, None, None], stored, scores))


def chosen_again(reuse: Reuse, chosen: Tensor, num_pages: Tensor) -> Tensor:
    """Return the mask ``[rows, lists, columns]`` of selected pages: the stored pages of rows that reuse them."""
    rows, lists, columns = chosen.shape
    pages, listed = reuse.pages[:rows], reuse.pages_listed[:rows]
    is_reused = _is_reused(reuse, num_pages)[:, None, None]
    # Entries beyond a list's length, and those of other rows, are marked in a spare last column.
    inside = is_reused & (torch.arange(pages.shape[2]) < listed[..., None])
    stored = torch.zeros(rows, lists, columns + 1, dtype=torch.bool)
    stored.scatter_(2, pages.where(inside, columns).long(), True)
    return torch.where(is_reused, stored[..., :columns], chosen)


def store_selection(reuse: Reuse, pages: Tensor, listed: Tensor) -> tuple[Tensor, Tensor]:
    """Store the selected pages of all rows with their epochs; return the stored pages and their number."""
    rows = len(pages)
    reuse.list_epochs[:rows] = reuse.epochs[:rows, None]
    return reuse.pages[:rows].copy_(pages), reuse.pages_listed[:rows].copy_(listed)


def _is_reused(reuse: Reuse, num_pages: Tensor) -> Tensor:
    """Return the mask ``[rows]`` of rows that reuse their selection."""
    rows = len(num_pages)
    return (num_pages > 0) & (reuse.list_epochs[:rows, 0] == reuse.epochs[:rows])
