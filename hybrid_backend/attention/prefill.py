"""Dense attention of prompt chunks over host pages, and sliding-window attention of local layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_backend.attention.partial import Partial, merge


def gather_tokens(blocks: Tensor, pages: Tensor, kv_heads: int, start: int, end: int) -> tuple[Tensor, Tensor]:
    """K and V of the tokens ``start:end`` of a sequence.

    Args:
        blocks: ``[pages * kv_heads * 2, page_size, head_dim]``.
        pages: ``[n]`` host page ids of the whole sequence.

    Returns:
        ``(k, v)``, each ``[1, kv_heads, end - start, head_dim]``.
    """
    page_size, dim = blocks.shape[1:]
    first = start // page_size
    ids = pages[first : -(-end // page_size)]
    index = (ids[None] * kv_heads + torch.arange(kv_heads)[:, None]).flatten() * 2
    gathered = blocks.index_select(0, torch.cat([index, index + 1])).view(2, 1, kv_heads, -1, dim)
    k, v = gathered.narrow(3, start - first * page_size, end - start)
    return k, v


def dense_prefill(q: Tensor, blocks: Tensor, pages: Tensor, seq_len: int, kv_heads: int, scale: float) -> Tensor:
    """Causal attention of a chunk: the last ``len(q)`` of ``seq_len`` tokens, all already in the host pool.

    The chunk attends the tokens before it without a mask and itself causally; both partials merge exactly, so no
    ``[chunk, context]`` mask is ever built.

    Args:
        q: ``[chunk, heads, head_dim]``.

    Returns:
        ``[chunk, heads, head_dim]`` fp32.
    """
    chunk, heads, dim = q.shape
    group = heads // kv_heads
    k, v = gather_tokens(blocks, pages, kv_heads, 0, seq_len)
    split = seq_len - chunk
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own_k, own_v = (x[:, :, split:].repeat_interleave(group, 1) for x in (k, v))
    out, lse = flash(q.transpose(0, 1)[None], own_k, own_v, 0.0, True, scale=scale)
    partial = Partial(out[0].float(), lse[0])
    if split:
        # The group's queries attend the same keys: fold them into the query length instead of repeating K and V.
        folded = q.view(chunk, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * chunk, dim)
        out, lse = flash(folded, k[:, :, :split], v[:, :, :split], 0.0, False, scale=scale)
        partial = merge(partial, Partial(out.reshape(heads, chunk, dim).float(), lse.reshape(heads, chunk)))
    return partial.out.transpose(0, 1)


def windowed(
    q: Tensor, blocks: Tensor, pages: Tensor, seq_len: int, kv_heads: int, scale: float, window: int
) -> Tensor:
    """As `dense_prefill`, but each query sees only the last ``window`` tokens, itself included. Any chunk length."""
    chunk = q.shape[0]
    first = max(0, seq_len - chunk - window + 1)
    k, v = gather_tokens(blocks, pages, kv_heads, first, seq_len)
    position = torch.arange(seq_len - chunk, seq_len)[:, None]
    key = torch.arange(first, seq_len)[None]
    mask = (key <= position) & (key > position - window)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask[None, None], scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).float()
