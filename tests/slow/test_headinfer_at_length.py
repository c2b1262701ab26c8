"""HeadInfer at the length of a real model's context: exact, whatever it streams in pieces and groups of heads."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import config_from_mapping
from tests.support.harness import Engine

pytestmark = pytest.mark.slow

PAGE, CONTEXT = 32, 32_736


@pytest.mark.parametrize("thresholds", [[16_384], [500_000]], ids=["two groups of heads", "one group"])
def test_headinfer_is_exact_at_32k_tokens(thresholds: list[int]) -> None:
    """Every output is dense attention in fp64, to 1e-5: Qwen2.5-0.5B's heads, buffers of an eighth of the context."""
    keys = {"method": "headinfer", "page_size": PAGE, "staging_tokens": 4096}
    config = config_from_mapping({**keys, "headinfer": {"group_thresholds": thresholds}}, "test")
    spec = ModelSpec(2, num_heads=14, num_kv_heads=2, head_dim=64, scale=0.125, dtype=torch.float32)
    engine = Engine(config, spec, num_pages=1100, max_requests=2, query_scale=3.0)
    engine.add_imported("a", CONTEXT, CONTEXT + 20)
    engine.prefill("a")
    for _ in range(4):
        engine.step({"a": 1}, tolerance=1e-5)
    assert engine.sequences["a"].tokens == CONTEXT + 24
    engine.close()
