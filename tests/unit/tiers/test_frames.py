"""Memory of the device tier."""

from __future__ import annotations

import psutil
import torch

from hybrid_backend.tiers.frames import device_zeros


def test_frames_of_a_cpu_are_zeros_that_take_memory_as_they_are_filled() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    frames = device_zeros((1 << 12, 1 << 16), torch.float32, torch.device("cpu"))
    assert frames.nbytes == 1 << 30
    frames[7] = 1
    assert frames[6:9].sum(1).tolist() == [0, 1 << 16, 0]
    assert process.memory_info().rss - before < 64 << 20


def test_no_frames_are_no_memory() -> None:
    assert device_zeros((0, 3, 2, 16, 64), torch.bfloat16, torch.device("cpu")).shape == (0, 3, 2, 16, 64)
