"""What attention of prompts is made of: blocks of earlier tokens, PyTorch's flash attention, sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial, with_sinks
from hybrid_backend.batch import sent


class KVBlock(NamedTuple):
    """K and V of some tokens: ``k``, ``v`` are ``[len(heads), tokens, head_dim]`` of the KV heads ``heads``."""

    heads: tuple[int, ...]
    k: Tensor
    v: Tensor


def gather_tokens(
    blocks: Tensor, pages: Tensor, kv_heads: int, start: int, end: int, heads: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """K and V of the tokens ``start:end`` of a sequence.

    Args:
        blocks: ``[pages * kv_heads * 2, page_size, head_dim]``.
        pages: ``[n]`` host page ids of the whole sequence.
        heads: KV heads that are wanted, None: all.

    Returns:
        ``(k, v)``, each ``[heads, end - start, head_dim]``.
    """
    page_size, dim = blocks.shape[1:]
    first = start // page_size
    ids = pages[first : -(-end // page_size)]
    wanted = sent(torch.tensor(range(kv_heads) if heads is None else heads), ids.device)
    index = (ids[None] * kv_heads + wanted[:, None]).flatten() * 2
    gathered = blocks.index_select(0, torch.cat([index, index + 1])).view(2, len(wanted), -1, dim)
    k, v = gathered.narrow(2, start - first * page_size, end - start)
    return k, v


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None) -> Partial:
    """PyTorch's flash attention for the tensors' device and type, with its log-sum-exp.

    Args:
        q, k, v: ``[heads, tokens, head_dim]``, as many heads in each. ``causal``: of equal lengths only.
        mask: ``[1 | heads, tokens, keys]`` bool, true: attended, which every query does of some key; not with
            ``causal``.

    Returns:
        ``out`` ``[heads, tokens, head_dim]`` in the type of ``q``, ``lse`` ``[heads, tokens]`` fp32, natural log.
    """
    aten, one, bias = torch.ops.aten, (q[None], k[None], v[None]), None
    if mask is not None:
        room = q.new_zeros(*mask.shape[:2], -(-mask.shape[2] // 16) * 16)  # aligned rows, as a GPU wants them
        bias = room[..., : mask.shape[2]].masked_fill_(~mask, float("-inf"))[None]
    if not q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*one, 0.0, causal, attn_mask=bias, scale=scale)
    elif q.dtype != torch.float32 and bias is None:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*one, 0.0, causal, False, scale=scale)
    else:  # FlashAttention has 16-bit types only, and no masks
        bias = None if bias is None else bias.expand(-1, len(q), -1, -1)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(*one, bias, True, 0.0, causal, scale=scale)
        lse = lse[..., : q.shape[1]]  # padded
    return Partial(out[0], lse[0])


def windowed(
    q: Tensor, blocks: Tensor, pages: Tensor, seq_len: int, kv_heads: int, scale: float, window: int,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each of the last ``len(q)`` of ``seq_len`` tokens sees the last ``window`` tokens, itself included.

    Args:
        q: ``[chunk, heads, head_dim]``, any chunk length; their K and V are in the pages already.
        sinks: ``[heads]`` fp32 (`with_sinks`).

    Returns:
        ``[chunk, heads, head_dim]`` fp32.
    """
    chunk = q.shape[0]
    first = max(0, seq_len - chunk - window + 1)
    group = q.shape[1] // kv_heads
    k, v = (x.repeat_interleave(group, 0) for x in gather_tokens(blocks, pages, kv_heads, first, seq_len))
    position = torch.arange(seq_len - chunk, seq_len, device=q.device)[:, None]
    key = torch.arange(first, seq_len, device=q.device)[None]
    mask = (key <= position) & (key > position - window)
    out, lse = flash(q.transpose(0, 1), k, v, False, scale, mask[None])
    return with_sinks(Partial(out.float(), lse), None if sinks is None else sinks[:, None]).out.transpose(0, 1)
