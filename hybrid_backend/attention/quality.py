"""What an approximation lost: attention mass covered by a selection, similarity of predicted queries."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels import cpu


def mass_recall(q: Tensor, blocks: Tensor, pages: Tensor, covered: Tensor, kv_heads: int, scale: float) -> float:
    """Share of the dense attention weights of the tokens (a model's attention sinks are none) that falls on the covered
    ones, mean over heads.

    Args:
        q: ``[heads, head_dim]``, the true query of one sequence.
        blocks: ``[pages * kv_heads * 2, page_size, head_dim]`` (`HostPool.blocks`).
        pages: ``[n]`` host pages of the sequence.
        covered: ``[1 | kv_heads, tokens]`` bool, over all tokens of the sequence.
    """
    keys = (pages[None] * kv_heads + torch.arange(kv_heads)[:, None]).flatten() * 2
    k = blocks.index_select(0, keys).view(kv_heads, -1, q.shape[1])[:, : covered.shape[1]]
    logits = torch.matmul(q.float().view(kv_heads, -1, q.shape[1]), k.float().transpose(1, 2)) * scale
    weights = logits.softmax(-1)  # [kv_heads, group, tokens]
    return float((weights * covered[:, None]).sum(-1).mean())


def kept_mass(q: Tensor, kv: Tensor, table: Tensor, seq_len: int, selected: Tensor, scale: float) -> float:
    """`mass_recall` of selected pages, by what the native kernels say of the sums where they serve the shape: a head's
    share is ``exp(lse of the selected pages - lse of all)``. In the calling thread.

    Args:
        q: ``[heads, head_dim]``, the true query of one sequence of ``seq_len`` tokens.
        kv: ``[pages, kv_heads, 2, page_size, head_dim]``.
        table: ``[n]`` int64 host pages of the sequence.
        selected: ``[1 | kv_heads, k]`` int64 logical pages.
    """
    kv_heads, page_size = kv.shape[1], kv.shape[3]
    if not (cpu.available() and cpu.decodes(len(q), kv_heads, q.shape[1], page_size)):
        covered = covered_tokens(selected, seq_len, page_size)
        return mass_recall(q, kv.flatten(0, 2), table, covered, kv_heads, scale)
    valid = torch.full_like(table, page_size)
    valid[-1] = seq_len - (len(table) - 1) * page_size
    kept, every = (
        cpu.partial(q[None], kv, table[which][None], valid[which][None], scale)[1]
        for which in (selected, torch.arange(len(table))[None])
    )
    return float((kept - every).exp().mean())


def covered_tokens(selected: Tensor, seq_len: int, page_size: int) -> Tensor:
    """``[lists, seq_len]`` bool: tokens of the selected logical pages (``[lists, k]``, -1 for padding)."""
    columns = -(-seq_len // page_size)
    chosen = torch.zeros(selected.shape[0], columns + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(selected >= 0, selected, columns), True)
    return chosen[:, :columns].repeat_interleave(page_size, 1)[:, :seq_len]


def query_cosine(predicted: Tensor, real: Tensor) -> float:
    """Mean cosine of predicted and true queries ``[rows, heads, head_dim]``, per head."""
    return float(torch.cosine_similarity(predicted.float(), real.float(), dim=-1).mean())
