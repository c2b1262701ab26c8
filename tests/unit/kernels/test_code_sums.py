"""Estimates by codes where a page's weights leave the range of fp32 (`CodeSumsFn` of kernels/cpu/src/isa.h)."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.kernels import codes, cpu, oracle
from hybrid_backend.kernels.cpu import operations as native

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


@pytest.mark.parametrize("isa", cpu.isas() if cpu.available() else [])
@pytest.mark.parametrize("size", [1.0, 12.0, 40.0])
def test_logits_far_from_their_page_s_middle_are_added_up_as_the_oracle_does(size: float, isa: str) -> None:
    """Of size 12 and more, some pages have tokens hundreds of nats above their middle, and others none but below it."""
    rng = torch.Generator().manual_seed(0)
    pages, kv_heads, dim, tokens = 40, 2, 64, 32
    keys = torch.randn(pages, kv_heads, tokens, dim, generator=rng) * size
    keys[pages // 2 :, :, 1:] = keys[pages // 2 :, :, :1]  # but for one token all keys are the same
    keys[pages // 2 :, :, 0] *= -1
    q, digests = torch.randn(1, 3 * kv_heads, dim, generator=rng) * size, codes.encode(keys)
    table, count = torch.arange(pages, dtype=torch.int32)[None], torch.tensor([pages], dtype=torch.int32)
    given = (q, digests, table, count, torch.tensor([4], dtype=torch.int32), "max", True, 0.5, dim**-0.5, tokens)
    expected, found = oracle.page_scores(*given), native.page_scores_with(isa, *given)
    assert size == 1 or float((expected * dim**-0.5).abs().max()) > 200
    assert float((found - expected).norm()) <= 0.02 * float(expected.norm())
