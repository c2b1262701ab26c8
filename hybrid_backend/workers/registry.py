"""Worker kernels by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial, paged_partial
from hybrid_backend.errors import ConfigError


class PartialKernel(Protocol):
    """Same contract as `hybrid_backend.attention.partial.paged_partial`."""

    def __call__(self, q: Tensor, blocks: Tensor, pages: PageList, kv_heads: int, scale: float) -> Partial: ...


_KERNELS: Mapping[str, PartialKernel] = MappingProxyType({"torch": paged_partial})


def kernel_names() -> list[str]:
    return sorted(_KERNELS)


def resolve_kernel(name: str) -> PartialKernel:
    """The kernel called ``name``; ``auto`` is the fastest one that is installed."""
    if name == "auto":
        name = "torch"
    if name not in _KERNELS:
        raise ConfigError(f"workers.kernel: unknown kernel {name!r}; known are auto, {', '.join(kernel_names())}")
    return _KERNELS[name]
