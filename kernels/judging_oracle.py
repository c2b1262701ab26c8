"""The operations of `contract.judging` in plain torch: for tests, and for machines without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Judgement, LayerToJudge, PromptToJudge

_INF = float("inf")


def prompt_weights(q: Tensor, kv: Tensor, pages: Tensor, tokens: int, first: int, older: int, scale: float) -> Tensor:
    # One head at a time, because K of all heads in fp32 would be larger than the bf16 K and V of a long context.
    head_pages = KvFormat.of(kv).with_heads(1)
    weights = []
    for head, head_q in enumerate(q.unflatten(1, (kv.shape[1], -1)).unbind(1)):
        keys = head_pages.keys(kv[:, head : head + 1], pages.long()).flatten(0, 2)[:tokens]
        weights.append(_head_weights(head_q, keys, first, older, scale))
    return torch.stack(weights)


def _head_weights(q: Tensor, k: Tensor, first: int, older: int, scale: float) -> Tensor:
    """Return the weights of one KV head for queries ``[n, group, head_dim]`` and keys ``[tokens, head_dim]``."""
    count, tokens = len(q), len(k)
    logits = torch.matmul(q.transpose(0, 1).float() * scale, k.float().T)  # [group, n, tokens]
    beyond = torch.arange(tokens) > torch.arange(tokens - count, tokens)[:, None]
    logits = logits.masked_fill(beyond | logits.isnan(), -_INF)
    spans = (logits[..., first:older], logits[..., older:])
    return torch.cat([span.softmax(-1).nan_to_num(0.0) for span in spans], -1).mean(1).amax(0)


def judge_layer(layer: LayerToJudge, prompt: PromptToJudge) -> tuple[Tensor, Tensor]:
    """Return `Judgement.keep_mask` and `Judgement.recent` of one layer. Nothing is copied to `LayerToJudge.store`."""
    kv_heads, judged = layer.host.shape[1], prompt.older - prompt.first
    if not len(layer.q):
        return torch.ones(kv_heads, judged, dtype=torch.bool), torch.zeros(kv_heads, prompt.tokens - prompt.older)
    weights = prompt_weights(layer.q, layer.host, prompt.pages, prompt.tokens, prompt.first, prompt.older, prompt.scale)
    return weights[:, :judged] > prompt.threshold, weights[:, judged:]


def copy_kept(layer: LayerToJudge, prompt: PromptToJudge, keep_mask: Tensor) -> None:
    """Copy the tokens that ``keep_mask`` (``[kv_heads, older - first]`` bool) is true for to `LayerToJudge.store`."""
    size = layer.host.shape[3]
    head, token = keep_mask.nonzero(as_tuple=True)
    place, token = (keep_mask.cumsum(1) - 1)[head, token], token + prompt.first
    source = prompt.pages.long()[token // size]
    kv = KvFormat.of(layer.host)
    kv.copy_tokens(layer.host, (source, head, token % size), layer.store, (place // size, head, place % size))


def judge(prompt: PromptToJudge) -> Judgement:
    """Judge a prompt in the calling thread and copy the kept tokens."""
    results = [judge_layer(layer, prompt) for layer in prompt.layers]
    for layer, (keep_mask, _) in zip(prompt.layers, results, strict=True):
        copy_kept(layer, prompt, keep_mask)
    return judgement_of(results)


def judgement_of(layers: list[tuple[Tensor, Tensor]]) -> Judgement:
    """Combine the results of `judge_layer`."""
    keep_mask, recent = (torch.stack(tensors) for tensors in zip(*layers, strict=True))
    return Judgement(keep_mask, recent, keep_mask.sum(2, dtype=torch.int32))
