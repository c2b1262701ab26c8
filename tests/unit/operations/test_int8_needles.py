"""Needles in 128k tokens: planted keys are found in 8 bits as in fp32, by every implementation."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Operations

TOKENS, PAGE, DIM = 128 * 1024, 128, 64
DEPTHS = (0.01, 0.5, 0.99)
"""Places of the needles, relative to the context: one for each query head."""
LOGIT = 24.0
"""Logit of a needle. Logits of random keys have a standard deviation of 3, and 128k of them weigh e^16 together."""
ERROR = 2e-2
"""Largest difference of outputs to fp32, of needles' values that are about 1. Measured: 9.1e-3."""

pytestmark = pytest.mark.slow  # Triton's interpreter takes 2,048 tiles


def test_needles_in_128k_tokens_are_found_as_in_fp32(operations: Operations) -> None:
    rng = torch.Generator().manual_seed(11)
    k, v = torch.randn(2, TOKENS, DIM, generator=rng)
    q = 3 * torch.randn(1, len(DEPTHS), DIM, generator=rng)
    needles = torch.tensor([int(depth * TOKENS) for depth in DEPTHS])
    k[needles] = q[0] * LOGIT * DIM**0.5 / q[0].square().sum(-1, keepdim=True)
    kv, where = KvFormat(1, PAGE, DIM, torch.int8), torch.arange(TOKENS)
    layer = torch.zeros(kv.shape(TOKENS // PAGE), dtype=torch.int8)
    kv.write(layer, where // PAGE, where % PAGE, k[:, None], v[:, None])
    order = torch.randperm(len(layer), generator=rng)  # Pages lie in any order, as those of a pool do.
    ids, tokens = order.argsort().int()[None, None], torch.tensor([[TOKENS]], dtype=torch.int32)
    out, lse = operations.paged_partial(q, layer[order].contiguous(), ids, tokens, DIM**-0.5)
    logits = q[0] @ k.T * DIM**-0.5
    weights = logits.softmax(-1)
    assert (weights.argmax(-1) == needles).all() and weights.amax(-1).min() > 0.9
    error, lse_error = (out[0, :, 0] - weights @ v).abs().max(), (lse[0, :, 0] - logits.logsumexp(-1)).abs().max()
    print(f"outputs differ by {error:.1e}, log-sum-exp by {lse_error:.1e}")
    assert error < ERROR and lse_error < LOGIT / 254
    # The value nearest to each output is that of the needle.
    assert (torch.cdist(out[0, :, 0], v).argmin(1) == needles).all()
