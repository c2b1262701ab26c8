"""What only the Triton kernels promise; `tests/unit/test_operations.py` checks what every implementation does."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.kernels.triton import operations


def test_a_small_batch_is_cut_into_parts_to_fill_the_device() -> None:
    assert operations.parts_for(rows=1, kv_heads=8, most_tokens=65536, processors=132) == 32
    assert operations.parts_for(rows=19, kv_heads=8, most_tokens=65536, processors=132) == 3, "456 programs: 4 at most"
    assert operations.parts_for(rows=40, kv_heads=8, most_tokens=65536, processors=132) == 2
    assert operations.parts_for(rows=100, kv_heads=8, most_tokens=65536, processors=132) == 1
    assert operations.parts_for(rows=1, kv_heads=8, most_tokens=256, processors=132) == 1
