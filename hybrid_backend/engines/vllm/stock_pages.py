"""Pages in the layout of vLLM's own CPU backend, which a connector brings from a prefill server."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from vllm._custom_ops import cpu_attn_reshape_and_cache
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from hybrid_backend.errors import EngineError

_DIGIT_BITS = 7
"""Bits of an integer that every dtype holds exactly."""
_CHUNK_PAGES = 64
"""Pages that are reordered at once, which bounds the temporary copy."""


def to_ours(layer: Tensor, pages: Tensor) -> None:
    """Reorder pages that vLLM's own backend of this CPU wrote, in place.

    Args:
        layer: ``[pages, kv_heads, 2, page_size, head_dim]``.
        pages: ``[n]`` int64, indices of the pages.
    """
    _, heads, _, page_size, head_dim = layer.shape
    order = stock_order(layer.dtype, page_size, head_dim)
    flat = layer.view(layer.shape[0], heads, -1)
    for chunk in pages.split(_CHUNK_PAGES):
        flat[chunk] = flat[chunk][:, :, order]


@cache
def stock_order(dtype: torch.dtype, page_size: int, head_dim: int) -> Tensor:
    """Return where vLLM's backend has each element of one head's page of ours: ``[2 * page_size * head_dim]`` int64.

    Its layout depends on the instruction set, on dtype and sizes (K is transposed; AMX packs pairs), and is documented
    nowhere. So its own operation stores tokens whose elements are their positions, digit by digit.

    Raises:
        EngineError: the layout is more than another order of the elements.
    """
    half = page_size * head_dim
    numbers = torch.arange(half).view(page_size, 1, head_dim)
    positions = torch.zeros(2 * half, dtype=torch.int64)
    for shift in range(0, half.bit_length(), _DIGIT_BITS):
        digit = (numbers >> shift & (1 << _DIGIT_BITS) - 1).to(dtype)
        page = torch.zeros(1, 1, 2 * page_size, head_dim, dtype=dtype)
        k, v = page.chunk(2, dim=2)
        isa = _get_attn_isa(dtype, page_size, head_dim)
        cpu_attn_reshape_and_cache(digit, digit, k, v, torch.arange(page_size), isa)
        positions |= page.flatten().long() << shift
    positions[half:] += half
    order = positions.argsort()
    if not torch.equal(positions[order], torch.arange(2 * half)):
        raise EngineError(
            f"--kv-transfer-config: vLLM's pages of {page_size} tokens, head size {head_dim} and {dtype} hold other "
            "values than ours; leave out --kv-transfer-config"
        )
    return order
