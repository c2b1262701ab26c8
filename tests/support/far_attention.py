"""Attention operators that torch has for CUDA only, with the results and the refusals of the real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any, scale: float) -> Any:
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention on CUDA takes 16-bit types only"
    none = torch.empty(0)
    return (*_dense(q, k, v, causal, scale), none, none, q.shape[2], k.shape[2], none, none, none)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse: bool, dropout: float = 0.0, causal: bool = False,
    *, scale: float,
) -> Any:  # fmt: skip
    assert lse and bias is None
    out, sums = _dense(q, k, v, causal, scale)
    padded = sums.new_full((*sums.shape[:2], -(-sums.shape[2] // 32) * 32), float("inf"))
    padded[..., : sums.shape[2]] = sums
    return out, padded, torch.empty(0), torch.empty(0)


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    assert q.shape[1] == k.shape[1] == v.shape[1], "as many query heads as KV heads"
    logits = q.float() @ k.float().transpose(-1, -2) * scale
    if causal:
        assert q.shape[2] == k.shape[2]
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
    return (logits.softmax(-1) @ v.float()).to(q.dtype), logits.logsumexp(-1)


CUDA_ONLY = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
}
