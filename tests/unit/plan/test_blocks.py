"""Blocks of a sequence, counted by hand; `tests/engines/vllm/test_blocks.py` compares them with vLLM's own code."""

from __future__ import annotations

from dataclasses import replace

from hybrid_backend.memory_plan.blocks import Blocks
from hybrid_backend.model import ModelShape
from hybrid_backend.model_layers import KvHeads
from tests.unit.plan.test_memory import SHAPE

PATTERNS: dict[str, tuple[int | None, ...]] = {
    "all full": (None,) * 6,
    "gemma 3": ((512,) * 5 + (None,)) * 4,
    "half": (128, None) * 5,
    "one more local": (128, None) * 5 + (128,),
    "last is local": ((512,) * 5 + (None,)) * 4 + (512,) * 4,
}


def shape_with(windows: tuple[int | None, ...]) -> ModelShape:
    return replace(SHAPE, layers=len(windows), windows=windows)


GEMMA4 = replace(
    shape_with(PATTERNS["gemma 3"]), window_heads=KvHeads(4 * SHAPE.kv_heads, SHAPE.head_dim // 2)
)  # twice the bytes per token of a layer with full attention
SHAPES: dict[str, ModelShape] = {
    **{name: shape_with(windows) for name, windows in PATTERNS.items()},
    "gemma 4": GEMMA4,
    "narrow windows": replace(GEMMA4, window_heads=KvHeads(SHAPE.kv_heads, SHAPE.head_dim // 2)),
    "llama 4": replace(shape_with(((256,) * 3 + (None,)) * 4), has_chunks=True),
}


def test_a_block_of_layers_whose_tokens_take_half_the_bytes_has_two_pages() -> None:
    blocks = Blocks.of(GEMMA4, 16)
    assert (blocks.pages_per_block, blocks.window_pages_per_block) == (2, 1)
    assert blocks.block_bytes == 4 * GEMMA4.page_bytes(16, 512) == 2 * 4 * GEMMA4.page_bytes(16)
    assert blocks.pool_pages(context=64, batch=1, in_flight=32) == 2 * (2 + 5 * (4 + 1) + 1)
    assert blocks.page_bytes * blocks.pool_pages(64, 1, 32) == blocks.block_bytes * blocks.pool(64, 1, 32)


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
