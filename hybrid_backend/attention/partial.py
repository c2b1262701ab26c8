"""Partial attention over lists of pages, and attention sinks. `Operations.merge_partials` merges partials."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.kernels.kv_format import gather_head_pages

_MAX_PADDING = 1.25
"""Rows are attended one by one if padding the lists to the longest list would read more than this factor of tokens."""


class Partial(NamedTuple):
    """Attention over a subset of the keys. A partial over no key has out 0 and LSE -inf."""

    out: Tensor
    """``[..., head_dim]`` fp32."""
    lse: Tensor
    """``[...]`` fp32 log-sum-exp of the logits, natural logarithm."""


class PageList(NamedTuple):
    """Pages to attend, one list per row, or one per row and KV head."""

    ids: Tensor
    """``[rows, 1 | kv_heads, k]`` int64 pages, the last page of the sequence last, then padding with -1."""
    valid: Tensor
    """``[rows, 1 | kv_heads, k]`` int64 tokens in each page; 0 for padding."""

    @property
    def tokens(self) -> float:
        """Number of tokens, averaged over the lists of a row and summed over rows."""
        return int(self.valid.sum()) / max(1, self.ids.shape[1])

    @property
    def pages(self) -> float:
        """Number of pages, averaged over the lists of a row and summed over rows."""
        return int((self.ids >= 0).sum()) / max(1, self.ids.shape[1])


def paged_partial(q: Tensor, layer: Tensor, pages: PageList, scale: float) -> Partial:
    """Attend the listed pages with one query per row, on the CPU.

    Args:
        q: ``[rows, heads, head_dim]``.
        layer: ``[pages, kv_heads, 2, page_size, head_dim]``, contiguous (`HostPool.layers`).
        pages: page lists; the ids are pages of ``layer``.
        scale: factor of the logits.

    Returns:
        Partial with out ``[rows, heads, head_dim]``.
    """
    rows, heads, dim = q.shape
    _, kv_heads, _, page_size, _ = layer.shape
    counts = pages.valid.sum(-1)  # [rows, lists]
    if rows > 1 and pages.valid.numel() * page_size > _MAX_PADDING * int(counts.sum()):
        partials = [
            paged_partial(q[r : r + 1], layer, PageList(pages.ids[r : r + 1], pages.valid[r : r + 1]), scale)
            for r in range(rows)
        ]
        return Partial(torch.cat([p.out for p in partials]), torch.cat([p.lse for p in partials]))
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim)
    if rows == 1 and pages.ids.shape[1] == 1:
        tokens = int(counts)
        used = -(-tokens // page_size) if tokens else 0
        if not used:
            return empty_partial(q)
        ids, written, mask = pages.ids[:, :, :used], None, None
    else:
        tokens = pages.ids.shape[2] * page_size
        if not tokens:
            return empty_partial(q)
        ids = pages.ids.clamp(min=0)
        written = (torch.arange(page_size) < pages.valid[..., None]).flatten(2)  # [rows, lists, k * page_size]
        mask = torch.zeros(written.shape, dtype=q.dtype).masked_fill_(~written, float("-inf"))
        mask = mask[:, :, None].expand(-1, kv_heads, grouped.shape[2], -1)
    heads_of = torch.arange(kv_heads)[None, :, None]
    index = (ids * kv_heads + heads_of).flatten()  # [rows, kv_heads, k]
    gathered = gather_head_pages(layer.flatten(0, 2), index, q.dtype)
    k, v = (x.view(rows, kv_heads, -1, dim).narrow(2, 0, tokens) for x in gathered)
    if written is not None:  # A slot that was never written may hold NaN, which a weight of 0 does not remove.
        k, v = (x.masked_fill(~written[..., None], 0.0) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    out = out.reshape(rows, heads, dim).float()
    # PyTorch's kernel returns LSE 0 instead of -inf for a row without tokens.
    if mask is not None:
        is_empty = (counts == 0).expand(-1, kv_heads)[..., None]
        lse = lse.masked_fill(is_empty, float("-inf"))
    return Partial(out, lse.reshape(rows, heads))


def empty_partial(q: Tensor) -> Partial:
    """Return the partial over no key, for queries ``q`` ``[rows, heads, head_dim]``."""
    return Partial(
        torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    )


def with_sinks(partial: Partial, sinks: Tensor | None) -> Partial:
    """Add the attention sink of each head, a learned logit that counts in the softmax's denominator only.

    gpt-oss (arXiv 2508.10925) has such sinks. StreamingLLM (arXiv 2309.17453) uses the first tokens instead.

    Args:
        partial: attention over all keys of a query. A sink must be added only once per query.
        sinks: fp32 logits, broadcast to ``partial.lse``; None or -inf: no sink.
    """
    if sinks is None:
        return partial
    lse = torch.logaddexp(partial.lse, sinks)
    base = lse.masked_fill(lse == float("-inf"), 0.0)
    return Partial(partial.out * (partial.lse - base).exp()[..., None], lse)
