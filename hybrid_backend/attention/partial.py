"""Partial attention over a list of pages; sinks. Partials are merged by `Operations.merge_partials`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Rows of unlike length are attended one by one where padding them to the longest would cost more than this factor.
_MAX_PADDING = 1.25


class Partial(NamedTuple):
    """Attention over a subset of the keys. ``out`` fp32 ``[..., head_dim]``, ``lse`` fp32 ``[...]``, natural log.

    The partial over no key is out 0, lse -inf.
    """

    out: Tensor
    lse: Tensor


class PageList(NamedTuple):
    """Pages to attend. ``ids``: ``[rows, 1 | kv_heads, k]`` int64, -1 for padding, padding last, tail page last of the
    pages; ``valid``: same shape, tokens of each page (0 for padding)."""

    ids: Tensor
    valid: Tensor

    @property
    def tokens(self) -> float:
        """Tokens attended, summed over rows; the mean over the lists of a row."""
        return int(self.valid.sum()) / max(1, self.ids.shape[1])

    @property
    def pages(self) -> float:
        """Pages listed, counted in the same way."""
        return int((self.ids >= 0).sum()) / max(1, self.ids.shape[1])


def paged_partial(q: Tensor, layer: Tensor, pages: PageList, scale: float) -> Partial:
    """Attention of one query token per row over its listed pages.

    Args:
        q: ``[rows, heads, head_dim]``.
        layer: ``[pages, kv_heads, 2, page_size, head_dim]``, contiguous (`HostPool.layers`, `SlotPool.layers`).
        pages: the lists; ids index ``layer``.
        scale: multiplies the logits.

    Returns:
        Partial of shape ``[rows, heads, head_dim]``.
    """
    rows, heads, dim = q.shape
    _, kv_heads, _, page_size, _ = layer.shape
    counts = pages.valid.sum(-1)  # [rows, lists]
    if rows > 1 and pages.valid.numel() * page_size > _MAX_PADDING * int(counts.sum()):
        each = [
            paged_partial(q[r : r + 1], layer, PageList(pages.ids[r : r + 1], pages.valid[r : r + 1]), scale)
            for r in range(rows)
        ]
        return Partial(torch.cat([p.out for p in each]), torch.cat([p.lse for p in each]))
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim)
    if rows == 1 and pages.ids.shape[1] == 1:
        tokens = int(counts)
        used = -(-tokens // page_size) if tokens else 0
        if not used:
            return empty_partial(q)
        ids, mask = pages.ids[:, :, :used], None
    else:
        tokens = pages.ids.shape[2] * page_size
        if not tokens:
            return empty_partial(q)
        ids = pages.ids.clamp(min=0)
        written = torch.arange(page_size) < pages.valid[..., None]  # [rows, lists, k, page_size]
        mask = torch.zeros(written.shape, dtype=q.dtype).masked_fill_(~written, float("-inf")).flatten(2)
        mask = mask[:, :, None].expand(-1, kv_heads, grouped.shape[2], -1)
    heads_of = torch.arange(kv_heads)[None, :, None]
    index = (ids * kv_heads + heads_of).flatten() * 2  # [rows, kv_heads, k]
    gathered = layer.flatten(0, 2).index_select(0, torch.cat([index, index + 1]))
    k, v = gathered.view(2, rows, kv_heads, -1, dim).narrow(3, 0, tokens)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    out = out.reshape(rows, heads, dim).float()
    if mask is not None:  # the kernel gives out 0, lse 0 to a fully masked row
        none = (counts == 0).expand(-1, kv_heads)[..., None]
        lse = lse.masked_fill(none, float("-inf"))
    return Partial(out, lse.reshape(rows, heads))


def empty_partial(q: Tensor) -> Partial:
    """The partial over no key, for queries ``[rows, heads, head_dim]``."""
    return Partial(
        torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    )


def with_sinks(partial: Partial, sinks: Tensor | None) -> Partial:
    """The attention over one more key, of a learned logit and no value: it takes part in the softmax's denominator only
    (gpt-oss, arXiv 2508.10925: StreamingLLM's attention sink, arXiv 2309.17453, without a token). To be called once for
    each query, when all of its keys are merged.

    ``sinks``: fp32 logits, to be broadcast to ``partial.lse``; -inf, as None: no sink.
    """
    if sinks is None:
        return partial
    lse = torch.logaddexp(partial.lse, sinks)
    base = lse.masked_fill(lse == float("-inf"), 0.0)
    return Partial(partial.out * (partial.lse - base).exp()[..., None], lse)
