"""Mapped host memory, which the kernel allocates at the first write."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype, flags: int = 0) -> tuple[Tensor, mmap.mmap]:
    """Return zeros that take no memory until they are written, and their mapping.

    ``flags`` are flags of mmap(2) in addition to ``MAP_PRIVATE | MAP_ANONYMOUS``.

    Raises:
        OSError: the operating system refuses the address space.
    """
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape), memory
