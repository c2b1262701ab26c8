"""Memory of the host that is mapped, and taken as it is written."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype, flags: int = 0) -> tuple[Tensor, mmap.mmap]:
    """Zeros that take no memory before they are written, and the mapping that they lie in. ``flags``: beside private
    and anonymous.

    Raises:
        OSError: the address space is refused.
    """
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape), memory
