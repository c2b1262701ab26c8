"""Pages as vLLM's own CPU backend lays them out, which is what a connector brings from a prefill server."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from vllm._custom_ops import cpu_attn_reshape_and_cache
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from hybrid_backend.errors import EngineError

_DIGIT = 7  # bits of a number that every dtype holds exactly
_AT_ONCE = 64  # pages: what is copied meanwhile stays small


def to_ours(layer: Tensor, pages: Tensor) -> None:
    """Bring pages (``[n]`` int64) of a layer, ``[pages, kv_heads, 2, page_size, head_dim]``, into that layout. They
    must lie as vLLM's own backend of this CPU writes them."""
    _, heads, _, page_size, head_dim = layer.shape
    order = stock_order(layer.dtype, page_size, head_dim)
    flat = layer.view(layer.shape[0], heads, -1)
    for some in pages.split(_AT_ONCE):
        flat[some] = flat[some][:, :, order]


@cache
def stock_order(dtype: torch.dtype, page_size: int, head_dim: int) -> Tensor:
    """``[2 * page_size * head_dim]`` int64: where vLLM's backend has each element of one head's page of ours.

    Its layout depends on the instruction set, on dtype and sizes (K is transposed; AMX packs pairs), and is described
    nowhere. So its own operation is asked: it stores tokens whose elements are their numbers, digit by digit.

    Raises:
        EngineError: it does not merely put them in another order.
    """
    half = page_size * head_dim
    numbers = torch.arange(half).view(page_size, 1, head_dim)
    found = torch.zeros(2 * half, dtype=torch.int64)
    for shift in range(0, half.bit_length(), _DIGIT):
        digit = (numbers >> shift & (1 << _DIGIT) - 1).to(dtype)
        page = torch.zeros(1, 1, 2 * page_size, head_dim, dtype=dtype)
        k, v = page.chunk(2, dim=2)
        cpu_attn_reshape_and_cache(
            digit, digit, k, v, torch.arange(page_size), _get_attn_isa(dtype, page_size, head_dim)
        )
        found |= page.flatten().long() << shift
    found[half:] += half
    order = found.argsort()
    if not torch.equal(found[order], torch.arange(2 * half)):
        raise EngineError(
            f"--kv-transfer-config: vLLM's pages of {page_size} tokens, head size {head_dim} and {dtype} hold other "
            "values than ours; leave out --kv-transfer-config"
        )
    return order
