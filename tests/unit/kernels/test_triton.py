"""What only the Triton kernels promise; `tests/unit/operations` checks what every implementation does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.kernels import oracle
from hybrid_backend.kernels.operations import Copies, Maps
from hybrid_backend.kernels.triton import operations
from tests.unit.implementations import implementation

pytestmark = pytest.mark.slow


def test_a_small_batch_is_cut_into_parts_to_fill_the_device() -> None:
    assert operations.parts_for(rows=1, kv_heads=8, most_tokens=65536, processors=132) == 32
    assert operations.parts_for(rows=19, kv_heads=8, most_tokens=65536, processors=132) == 3, "456 programs: 4 at most"
    assert operations.parts_for(rows=40, kv_heads=8, most_tokens=65536, processors=132) == 2
    assert operations.parts_for(rows=100, kv_heads=8, most_tokens=65536, processors=132) == 1
    assert operations.parts_for(rows=1, kv_heads=8, most_tokens=256, processors=132) == 1


@pytest.mark.parametrize("listed", [3, 512, 513, 1400])
def test_of_a_list_that_is_longer_than_what_is_sorted_at_a_time_the_best_are_recalled(listed: int) -> None:
    """As where a row that attends all of its pages has few of them in its frames. Scores repeat."""
    columns, frames, most = 1500, 9, 6
    rng = torch.Generator().manual_seed(listed)
    scores = torch.randint(40, (1, 1, columns), generator=rng).float()
    absent = torch.zeros(1, 1, columns, dtype=torch.int32)
    absent[0, 0, :listed] = torch.randperm(columns - frames, generator=rng)[:listed].sort().values + frames
    table, one = torch.randperm(columns, generator=rng).int()[None], torch.ones(1, dtype=torch.int32)
    found = []
    for each in (oracle, implementation("triton")):
        frame_of = torch.full((1, columns), -1, dtype=torch.int32)
        frame_of[0, :frames] = torch.arange(frames)
        maps = Maps(frame_of, torch.arange(frames, dtype=torch.int32), torch.zeros(frames))
        copies = Copies(
            *torch.zeros(3, 1, most, dtype=torch.int32), torch.zeros(1, most), torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip
        each.plan_recall(
            maps, copies, scores, table, (absent[..., :1], 0 * one[None]), (absent, listed * one[None]),
            columns * one, 5 * one, 0 * one, one, 0 * one, 0, 1, 1, 0, torch.zeros(1, frames, dtype=torch.int32),
        )  # fmt: skip
        found.append([*maps, *copies[:3]])
    assert int((found[0][3] >= 0).sum()) == min(most, listed)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
