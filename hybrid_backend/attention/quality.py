"""Measures of approximation errors: attention mass of a selection, cosine of predicted queries."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.kv_format import gather_head_pages


def mass_recall(q: Tensor, blocks: Tensor, pages: Tensor, covered: Tensor, kv_heads: int, scale: float) -> float:
    """Return the attention mass of the covered tokens: their share of the exact attention weights, mean over heads.

    Learned attention sinks of the model are not part of the weights.

    Args:
        q: true query of one sequence, ``[heads, head_dim]``.
        blocks: one layer of the host pool (`HostPool.blocks`).
        pages: ``[n]`` int64 host pages of the sequence.
        covered: covered tokens of the sequence, ``[1 | kv_heads, tokens]`` bool.
        kv_heads: KV heads of the layer.
        scale: factor of the logits.
    """
    head_pages = (pages[None] * kv_heads + torch.arange(kv_heads)[:, None]).flatten()
    if blocks.dtype is torch.int8:
        k = gather_head_pages(blocks, head_pages, torch.float32)[0]
    else:
        k = blocks.index_select(0, 2 * head_pages)
    k = k.view(kv_heads, -1, q.shape[1])[:, : covered.shape[1]]
    logits = torch.matmul(q.float().view(kv_heads, -1, q.shape[1]), k.float().transpose(1, 2)) * scale
    weights = logits.softmax(-1)  # [kv_heads, group, tokens]
    return float((weights * covered[:, None]).sum(-1).mean())


def kept_mass(q: Tensor, kv: Tensor, table: Tensor, seq_len: int, selected: Tensor, scale: float) -> float:
    """Return the attention mass of selected pages (`mass_recall`), computed in the calling thread.

    The native kernels, if they serve the shape, give the LSE over the selected pages and the LSE over all pages. The
    mass of a head is the exponential of the difference.

    Args:
        q: true query of one sequence, ``[heads, head_dim]``.
        kv: one layer of the host pool, ``[pages, kv_heads, 2, page_size, head_dim]``.
        table: block table of the sequence, ``[n]`` int64 host pages.
        seq_len: sequence length in tokens.
        selected: selected logical pages, ``[1 | kv_heads, k]`` int64.
        scale: factor of the logits.
    """
    kv_heads, page_size = kv.shape[1], kv.shape[3]
    if not (cpu.available() and cpu.decodes(len(q), kv_heads, q.shape[1], page_size)):
        covered = covered_tokens(selected, seq_len, page_size)
        return mass_recall(q, kv.flatten(0, 2), table, covered, kv_heads, scale)
    valid = torch.full_like(table, page_size)
    valid[-1] = seq_len - (len(table) - 1) * page_size
    selected_lse, full_lse = (
        cpu.partial(q[None], kv, table[pages][None], valid[pages][None], scale)[1]
        for pages in (selected, torch.arange(len(table))[None])
    )
    return float((selected_lse - full_lse).exp().mean())


def covered_tokens(selected: Tensor, seq_len: int, page_size: int) -> Tensor:
    """Return the tokens of selected logical pages (``[lists, k]`` int64, -1: padding) as ``[lists, seq_len]`` bool."""
    columns = -(-seq_len // page_size)
    chosen = torch.zeros(selected.shape[0], columns + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(selected >= 0, selected, columns), True)
    return chosen[:, :columns].repeat_interleave(page_size, 1)[:, :seq_len]


def query_cosine(predicted: Tensor, real: Tensor) -> float:
    """Return the cosine of predicted and true queries ``[rows, heads, head_dim]``, mean over rows and heads."""
    return float(torch.cosine_similarity(predicted.float(), real.float(), dim=-1).mean())
