"""Blocks of a sequence, counted by hand, and against vLLM's own code."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_backend.hardware import ModelShape
from hybrid_backend.plan.blocks import Blocks
from hybrid_backend.plan.model import DTYPES
from tests.plan.test_memory import SHAPE

PATTERNS: dict[str, tuple[int | None, ...]] = {
    "all full": (None,) * 6,
    "gemma 3": ((512,) * 5 + (None,)) * 4,
    "half": (128, None) * 5,
    "one more local": (128, None) * 5 + (128,),
    "last is local": ((512,) * 5 + (None,)) * 4 + (512,) * 4,
}


def shape_with(windows: tuple[int | None, ...]) -> ModelShape:
    return replace(SHAPE, layers=len(windows), windows=windows)


def test_a_block_of_a_plain_model_is_one_page_of_every_layer() -> None:
    blocks = Blocks.of(SHAPE, 16)
    assert blocks.block_bytes == SHAPE.layers * SHAPE.page_bytes(16)
    assert blocks.per_sequence(context=33, in_flight=512) == 3
    assert blocks.pool(context=33, batch=5, in_flight=512) == 16  # and the block that is never handed out
    assert blocks.in_bytes(16 * blocks.block_bytes + 5) == 16


def test_a_sliding_window_takes_no_more_blocks_than_its_tokens_and_those_in_flight() -> None:
    blocks = Blocks.of(shape_with(PATTERNS["half"]), 16)
    short, long = blocks.per_sequence(64, in_flight=32), blocks.per_sequence(16_000, in_flight=32)
    assert short == 4 + 5
    assert long == 1000 + (-(-(127 + 32) // 16) + 1)


@pytest.mark.engine
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("context", [100, 5000])
def test_blocks_are_vllms(pattern: str, context: int) -> None:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = shape_with(PATTERNS[pattern])
    like: dict[str, Any] = {
        "block_size": 16, "num_kv_heads": shape.kv_heads, "head_size": shape.head_dim, "dtype": DTYPES[shape.dtype],
    }  # fmt: skip
    specs = {
        f"layer.{i}": FullAttentionSpec(**like) if window is None else SlidingWindowSpec(**like, sliding_window=window)
        for i, window in enumerate(shape.windows)
    }
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
    needed = sum(group.kv_cache_spec.max_memory_usage_bytes(engine) // page for group in groups)
    assert blocks.per_sequence(context, engine.max_in_flight_tokens) == needed
    assert torch.finfo(DTYPES[shape.dtype]).bits // 8 == shape.dtype_bytes
