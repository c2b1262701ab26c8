"""Building blocks of the attention of prompts: K and V of earlier tokens, flash attention, sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial, with_sinks
from hybrid_backend.batch import sent
from hybrid_backend.kernels.kv_format import gather_head_pages


class KVBlock(NamedTuple):
    """K and V of some tokens and some KV heads of a sequence."""

    heads: tuple[int, ...]
    """KV heads of the block."""
    k: Tensor
    """``[len(heads), tokens, head_dim]``."""
    v: Tensor
    """``[len(heads), tokens, head_dim]``."""


def gather_tokens(
    blocks: Tensor, pages: Tensor, kv_heads: int, start: int, end: int, dtype: torch.dtype,
    heads: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Copy K and V of the tokens ``start:end`` of a sequence out of its pages.

    Args:
        blocks: one layer of the host pool (`HostPool.blocks`).
        pages: ``[n]`` int64 host pages of the whole sequence.
        kv_heads: KV heads of the layer.
        start: first token.
        end: token after the last one.
        dtype: dtype of what pages in 8 bits decode to.
        heads: KV heads to copy; None: all.

    Returns:
        ``(k, v)``, each ``[heads, end - start, head_dim]``.
    """
    page_size = blocks.shape[1]
    first = start // page_size
    ids = pages[first : -(-end // page_size)]
    head_ids = sent(torch.tensor(range(kv_heads) if heads is None else heads), ids.device)
    head_pages = (ids[None] * kv_heads + head_ids[:, None]).flatten()
    k, v = (
        x.view(len(head_ids), -1, x.shape[2]).narrow(1, start - first * page_size, end - start)
        for x in gather_head_pages(blocks, head_pages, dtype)
    )
    return k, v


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None) -> Partial:
    """Compute attention and its LSE with the fastest PyTorch kernel for the device and dtype of the tensors.

    Args:
        q: ``[heads, tokens, head_dim]``.
        k: ``[heads, keys, head_dim]``, with as many heads as ``q``.
        v: shaped like ``k``.
        causal: token i attends keys 0 to i only. There must be as many tokens as keys.
        scale: factor of the logits.
        mask: ``[1 | heads, tokens, keys]`` bool, true where a token attends a key; not together with ``causal``. Each
            token must attend at least one key.

    Returns:
        Partial with out ``[heads, tokens, head_dim]`` in the dtype of ``q`` and LSE ``[heads, tokens]`` fp32.
    """
    aten, qkv, bias = torch.ops.aten, (q[None], k[None], v[None]), None
    if mask is not None:
        # GPU kernels need rows of the bias that are aligned to 16 elements.
        padded = q.new_zeros(*mask.shape[:2], -(-mask.shape[2] // 16) * 16)
        bias = padded[..., : mask.shape[2]].masked_fill_(~mask, float("-inf"))[None]
    if not q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, causal, attn_mask=bias, scale=scale)
    elif q.dtype != torch.float32 and bias is None:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal, False, scale=scale)
    else:
        # PyTorch's FlashAttention kernel supports neither fp32 nor masks.
        bias = None if bias is None else bias.expand(-1, len(q), -1, -1)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(*qkv, bias, True, 0.0, causal, scale=scale)
        # This kernel returns an LSE that is padded beyond the last token.
        lse = lse[..., : q.shape[1]]
    return Partial(out[0], lse[0])


def windowed(
    q: Tensor, new: tuple[Tensor, Tensor], blocks: Tensor, pages: Tensor, seq_len: int, scale: float, window: int,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute sliding-window attention of the last tokens of a sequence; K and V of earlier tokens are in pages.

    Args:
        q: queries of the last ``chunk`` tokens, ``[chunk, heads, head_dim]``.
        new: K and V of these tokens, ``[chunk, kv_heads, head_dim]`` each.
        blocks: one layer of the host pool (`HostPool.blocks`).
        pages: ``[n]`` int64 host pages of the whole sequence.
        seq_len: sequence length, including the chunk.
        scale: factor of the logits.
        window: number of tokens that a token attends, including itself.
        sinks: ``[heads]`` fp32 logits of attention sinks (`with_sinks`); None: no sinks.

    Returns:
        ``[chunk, heads, head_dim]`` fp32.
    """
    chunk, kv_heads = new[0].shape[:2]
    first, before = max(0, seq_len - chunk - window + 1), seq_len - chunk
    k, v = (x.transpose(0, 1) for x in new)
    if first < before:
        earlier = gather_tokens(blocks, pages, kv_heads, first, before, q.dtype)
        k, v = torch.cat([earlier[0], k], 1), torch.cat([earlier[1], v], 1)
    k, v = (x.repeat_interleave(q.shape[1] // kv_heads, 0) for x in (k, v))
    position = torch.arange(seq_len - chunk, seq_len, device=q.device)[:, None]
    key = torch.arange(first, seq_len, device=q.device)[None]
    mask = (key <= position) & (key > position - window)
    out, lse = flash(q.transpose(0, 1), k, v, False, scale, mask[None])
    return with_sinks(Partial(out.float(), lse), None if sinks is None else sinks[:, None]).out.transpose(0, 1)
