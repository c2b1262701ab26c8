"""From selected logical pages to the page lists that kernels attend."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList
from hybrid_backend.attention.selection import compact
from hybrid_backend.step import DecodeRows


def valid_tokens(rows: DecodeRows, selected: Tensor, page_size: int) -> Tensor:
    """Tokens of each selected page: a full page, but for the growing tail page. 0 for padding.

    ``selected``: ``[rows, lists, k]`` logical pages, -1 for padding.
    """
    tail = (rows.seq_lens - (rows.num_pages - 1) * page_size)[:, None, None]
    is_tail = selected == (rows.num_pages - 1)[:, None, None]
    return torch.where(is_tail, tail, page_size).masked_fill_(selected < 0, 0)


def page_list(
    rows: DecodeRows, selected: Tensor, table: Tensor, page_size: int, keep: Tensor | None = None
) -> PageList:
    """Look the selected logical pages up in ``table`` (``[rows, columns]``: host pages or slots).

    ``keep``, same shape as ``selected``, restricts the list to some of them and moves those to the front.
    """
    valid = valid_tokens(rows, selected, page_size)
    lists = selected.shape[1]
    ids = table[:, None].expand(-1, lists, -1).gather(2, selected.clamp(min=0))
    if keep is None:
        return PageList(ids.masked_fill(selected < 0, -1), valid)
    ids, order = compact(ids, keep)
    return PageList(ids, valid.gather(-1, order).masked_fill(ids < 0, 0))
