"""What an approximation lost: attention mass covered by a selection, similarity of predicted queries."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.attention.prefill import gather_tokens


def mass_recall(
    q: Tensor, blocks: Tensor, pages: Tensor, seq_len: int, selected: Tensor, kv_heads: int, scale: float
) -> float:
    """Share of the dense attention weights that falls on the selected pages, mean over heads.

    Args:
        q: ``[heads, head_dim]``, the true query of one sequence.
        pages: ``[n]`` host pages of the sequence.
        selected: ``[1 | kv_heads, k]`` logical pages, -1 for padding.
    """
    dim = q.shape[1]
    page_size = blocks.shape[1]
    k, _ = gather_tokens(blocks, pages, kv_heads, 0, seq_len)
    logits = torch.matmul(q.float().view(kv_heads, -1, dim), k[0].float().transpose(1, 2)) * scale
    weights = logits.softmax(-1)  # [kv_heads, group, tokens]
    columns = -(-seq_len // page_size)
    chosen = torch.zeros(selected.shape[0], columns + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(selected >= 0, selected, columns), True)
    tokens = chosen[:, :columns].repeat_interleave(page_size, 1)[:, :seq_len]
    return float((weights * tokens[:, None]).sum(-1).mean())


def query_cosine(predicted: Tensor, real: Tensor) -> float:
    """Mean cosine of predicted and true queries ``[rows, heads, head_dim]``, per head."""
    return float(torch.cosine_similarity(predicted.float(), real.float(), dim=-1).mean())
