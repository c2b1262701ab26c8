"""Worker kernels by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial, paged_partial
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels import cpu


class PartialKernel(Protocol):
    """Same contract as `hybrid_backend.attention.partial.paged_partial`."""

    def __call__(self, q: Tensor, layer: Tensor, pages: PageList, scale: float) -> Partial: ...


def native_partial(q: Tensor, layer: Tensor, pages: PageList, scale: float) -> Partial:
    """The C++ kernel, in the calling thread."""
    return Partial(*cpu.partial(q, layer, pages.ids, pages.valid, scale))


_KERNELS: Mapping[str, PartialKernel] = MappingProxyType({"native": native_partial, "torch": paged_partial})


def kernel_names() -> list[str]:
    return sorted(_KERNELS)


def kernel_name(name: str) -> str:
    """What ``auto`` stands for here; any other name stands for itself."""
    if name != "auto":
        return name
    return "native" if cpu.available() else "torch"


def resolve_kernel(name: str) -> PartialKernel:
    """The kernel called ``name``; ``auto`` is the fastest one that runs here.

    Raises:
        ConfigError: no such kernel, or it does not run on this machine.
    """
    name = kernel_name(name)
    if name == "native" and (reason := cpu.why_unavailable()):
        raise ConfigError(f"workers.kernel: {reason}")
    if name not in _KERNELS:
        raise ConfigError(f"workers.kernel: unknown kernel {name!r}; known are auto, {', '.join(kernel_names())}")
    return _KERNELS[name]
