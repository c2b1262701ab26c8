"""Reference implementations in plain torch, in the dtype that the caller chooses (fp64 in the tests).

They are written for reading: loops over rows and heads and no batching, so that a fast kernel and its reference share
no mistake. Pages are ``[pages, kv_heads, 2, page_size, head_dim]``, K before V.
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    pool: Tensor,
    pages: Tensor,
    valid: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
    skips: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the tokens of each row's listed pages with the row's single query.

    Args:
        q: ``[rows, heads, head_dim]``.
        pool: ``[pages, kv_heads, 2, page_size, head_dim]``.
        pages: ``[rows, 1 | kv_heads, k]`` page ids, -1 for padding; one list per row, or one per KV head.
        valid: same shape, tokens to attend at the start of each page; 0 for padding.
        scale: factor of the logits.
        dtype: dtype of the computation and the results.
        skips: ``[rows]`` tokens that are left out at the start of the first page of each row's lists; None: none.
        sinks: ``[heads]`` logits of one more key of each head, whose value is 0; None: no sink.

    Returns:
        ``(out [rows, heads, head_dim], lse [rows, heads])``, natural log. Without any key out is 0 and lse -inf.
    """
    rows, heads, dim = q.shape
    kv_heads = pool.shape[1]
    group = heads // kv_heads
    out = torch.zeros(rows, heads, dim, dtype=dtype)
    lse = torch.full((rows, heads), float("-inf"), dtype=dtype)
    for r in range(rows):
        for h in range(heads):
            kv_head = h // group
            line = kv_head if pages.shape[1] > 1 else 0
            listed = [(int(p), int(n)) for p, n in zip(pages[r, line], valid[r, line], strict=True) if p >= 0 and n > 0]
            if not listed:
                continue
            skip = 0 if skips is None else int(skips[r])
            k = torch.cat([pool[p, kv_head, 0, :n] for p, n in listed])[skip:].to(dtype)
            v = torch.cat([pool[p, kv_head, 1, :n] for p, n in listed])[skip:].to(dtype)
            logits = (k @ q[r, h].to(dtype)) * scale
            if sinks is not None:
                logits, v = torch.cat([logits, sinks[h : h + 1].to(dtype)]), torch.cat([v, torch.zeros_like(v[:1])])
            lse[r, h] = logits.logsumexp(0)
            out[r, h] = logits.softmax(0) @ v
    return out, lse


def digest(page: Tensor, tokens: int) -> Tensor:
    """Compute the digest of one page's first keys (Quest, section 3.2): channel-wise maxima, then minima.

    Args:
        page: ``[kv_heads, 2, page_size, head_dim]``.
        tokens: number of keys.

    Returns:
        ``[kv_heads, 2, head_dim]``.
    """
    keys = page[:, 0, :tokens]
    return torch.stack([keys.amax(1), keys.amin(1)], 1)


def digest_scores(q: Tensor, digests: Tensor) -> Tensor:
    """Compute Quest's upper bound of each query head's largest logit in each page: ``sum_d max(q*min, q*max)``.

    Args:
        q: ``[heads, head_dim]``.
        digests: ``[pages, kv_heads, 2, head_dim]``.

    Returns:
        ``[heads, pages]``, not scaled.
    """
    heads, kv_heads = q.shape[0], digests.shape[1]
    d = digests.repeat_interleave(heads // kv_heads, 1)
    return torch.maximum(q[None] * d[:, :, 0], q[None] * d[:, :, 1]).sum(-1).T


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute ``x / rms(x) * weight`` over the last dimension."""
    return torch.stack([row / (row.square().mean() + epsilon).sqrt() * weight for row in x.flatten(0, -2)]).view_as(x)


def rotated(x: Tensor, angles: Tensor, is_neox: bool) -> Tensor:
    """Apply a rotary embedding (RoFormer, arXiv 2104.09864), which rotates pair ``i`` of each head by angle ``i``.

    Args:
        x: ``[rows, heads, head_dim]``.
        angles: ``[rows, pairs]``; elements beyond the pairs stay.
        is_neox: pair ``i`` is elements ``i`` and ``pairs + i``; else ``2 * i`` and ``2 * i + 1``.
    """
    turned, pairs = x.clone(), angles.shape[1]
    for row in range(len(x)):
        for i in range(pairs):
            pair = [i, pairs + i] if is_neox else [2 * i, 2 * i + 1]
            cos, sin = angles[row, i].cos(), angles[row, i].sin()
            turned[row][:, pair] = x[row][:, pair] @ torch.stack([torch.stack([cos, sin]), torch.stack([-sin, cos])])
    return turned
