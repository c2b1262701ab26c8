"""Timing of a call whose work a device may finish later."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds_of(device: torch.device, run: Callable[[], object], times: int = 1) -> float:
    """Return the mean seconds of ``times`` calls, with the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(times):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / times
