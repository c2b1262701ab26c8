"""Dense attention of prompt chunks over what came before them, and sliding-window attention of local layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_backend.attention.partial import Partial, merge


class KVBlock(NamedTuple):
    """K and V of some tokens: ``k``, ``v`` are ``[len(heads), tokens, head_dim]`` of the KV heads ``heads``."""

    heads: tuple[int, ...]
    k: Tensor
    v: Tensor


def gather_tokens(blocks: Tensor, pages: Tensor, kv_heads: int, start: int, end: int) -> tuple[Tensor, Tensor]:
    """K and V of the tokens ``start:end`` of a sequence.

    Args:
        blocks: ``[pages * kv_heads * 2, page_size, head_dim]``.
        pages: ``[n]`` host page ids of the whole sequence.

    Returns:
        ``(k, v)``, each ``[kv_heads, end - start, head_dim]``.
    """
    page_size, dim = blocks.shape[1:]
    first = start // page_size
    ids = pages[first : -(-end // page_size)]
    index = (ids[None] * kv_heads + torch.arange(kv_heads)[:, None]).flatten() * 2
    gathered = blocks.index_select(0, torch.cat([index, index + 1])).view(2, kv_heads, -1, dim)
    k, v = gathered.narrow(2, start - first * page_size, end - start)
    return k, v


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, before: Iterable[KVBlock], scale: float) -> Tensor:
    """Exact attention of consecutive tokens: causal over themselves, without a mask over all that came before.

    The partials merge exactly, so no ``[chunk, context]`` mask is ever built.

    Args:
        q: ``[chunk, heads, head_dim]``.
        k, v: ``[chunk, kv_heads, head_dim]``.
        before: earlier tokens; together the blocks hold every (token, KV head) that counts once.

    Returns:
        ``[chunk, heads, head_dim]`` fp32.
    """
    group = q.shape[1] // k.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own_k, own_v = (x.transpose(0, 1)[None].repeat_interleave(group, 1) for x in (k, v))
    out, lse = flash(q.transpose(0, 1)[None], own_k, own_v, 0.0, True, scale=scale)
    return merge_blocks(Partial(out[0].float(), lse[0]), q, before, scale, k.shape[1]).out.transpose(0, 1)


def merge_blocks(partial: Partial, q: Tensor, before: Iterable[KVBlock], scale: float, kv_heads: int) -> Partial:
    """Merge the attention of ``q`` (``[chunk, heads, head_dim]``) over the blocks, unmasked, into ``partial``
    (``[heads, chunk, head_dim]``), which it may overwrite."""
    chunk, heads, dim = q.shape
    group = heads // kv_heads
    # The group's queries attend the same keys: fold them into the query length instead of repeating K and V.
    folded = q.view(chunk, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * chunk, dim)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for block in before:
        is_all = len(block.heads) == kv_heads
        queries = folded if is_all else folded[list(block.heads)]
        out, lse = flash(queries[None], block.k[None], block.v[None], 0.0, False, scale=scale)
        found = Partial(out.reshape(-1, chunk, dim).float(), lse.reshape(-1, chunk))
        if is_all:
            partial = merge(partial, found)
            continue
        mine = (torch.tensor(block.heads)[:, None] * group + torch.arange(group)).flatten()
        partial.out[mine], partial.lse[mine] = merge(Partial(partial.out[mine], partial.lse[mine]), found)
    return partial


def windowed(
    q: Tensor, blocks: Tensor, pages: Tensor, seq_len: int, kv_heads: int, scale: float, window: int
) -> Tensor:
    """Each of the last ``len(q)`` of ``seq_len`` tokens sees the last ``window`` tokens, itself included.

    Args:
        q: ``[chunk, heads, head_dim]``, any chunk length; their K and V are in the pages already.

    Returns:
        ``[chunk, heads, head_dim]`` fp32.
    """
    chunk = q.shape[0]
    first = max(0, seq_len - chunk - window + 1)
    k, v = gather_tokens(blocks, pages, kv_heads, first, seq_len)
    position = torch.arange(seq_len - chunk, seq_len)[:, None]
    key = torch.arange(first, seq_len)[None]
    mask = (key <= position) & (key > position - window)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask[None, None], scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).float()
