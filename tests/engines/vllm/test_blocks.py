"""Blocks of a sequence against vLLM's own code."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_backend.memory_plan.blocks import Blocks
from hybrid_backend.model import DTYPES
from tests.unit.plan.test_blocks import SHAPES

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("context", [100, 5000])
def test_blocks_are_vllms(name: str, context: int) -> None:
    planning = "vllm.v1.core.kv_cache_planning"  # since 0.33
    module = planning if find_spec(planning) else "vllm.v1.core.kv_cache_utils"
    get_kv_cache_groups = import_module(module).get_kv_cache_groups
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

    shape = SHAPES[name]

    def spec(window: int | None) -> Any:
        kv_heads, head_dim = shape.heads_of(window)
        like: dict[str, Any] = {
            "block_size": 16, "num_kv_heads": kv_heads, "head_size": head_dim, "dtype": DTYPES[shape.dtype],
        }  # fmt: skip
        if window is None:
            return FullAttentionSpec(**like)
        if shape.has_chunks:
            return ChunkedLocalAttentionSpec(**like, attention_chunk_size=window)
        return SlidingWindowSpec(**like, sliding_window=window)

    specs = {f"layer.{i}": spec(window) for i, window in enumerate(shape.windows)}
    engine: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=256),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)),
        model_config=SimpleNamespace(max_model_len=context),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
        max_in_flight_tokens=512,
    )
    groups = get_kv_cache_groups(engine, specs)
    page = groups[0].kv_cache_spec.page_size_bytes
    blocks = Blocks.of(shape, 16)
    assert blocks.block_bytes == max(len(group.layer_names) for group in groups) * page
    full = next((g for g in groups if isinstance(g.kv_cache_spec, FullAttentionSpec)), None)
    assert full is None or full.kv_cache_spec.block_size == 16 * blocks.pages_per_block
    needed = sum(group.kv_cache_spec.max_memory_usage_bytes(engine) // page for group in groups)
    assert blocks.per_sequence(context, engine.max_in_flight_tokens) == needed
    assert torch.finfo(DTYPES[shape.dtype]).bits // 8 == shape.dtype_bytes
