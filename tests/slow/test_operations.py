"""Sequences of steps (tests/unit/operations/test_sequences.py) with Triton's kernels, slow under the interpreter."""

from __future__ import annotations

from hybrid_backend.kernels.operations import Operations
from tests.unit.implementations import NAMES, over_implementations
from tests.unit.operations.conftest import one_thread
from tests.unit.operations.test_sequences import SEQUENCES, check_sequence

__all__ = ["one_thread"]  # a fixture


@over_implementations(0.2, names=NAMES[2:], **SEQUENCES)
def test_sequences_of_steps_leave_the_oracles_maps_and_frames(
    operations: Operations, seed: int, per_head: bool, interval: int, lasts: int
) -> None:
    check_sequence(operations, seed, per_head, interval, lasts)
