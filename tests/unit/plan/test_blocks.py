"""Blocks of a sequence, counted by hand; `tests/engines/vllm/test_blocks.py` compares them with vLLM's own code."""

from __future__ import annotations

from dataclasses import replace

from hybrid_backend.memory_plan.blocks import Blocks
from hybrid_backend.model import ModelShape
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
