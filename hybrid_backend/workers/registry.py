"""Worker kernels by name."""

from __future__ import annotations

import os
import shutil
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
IPEX = "ipex"  # runs in a process of its own: a pool (`workers/ipex.py`), not a kernel that can be called here
ENV_IPEX = "HYBRID_IPEX_PYTHON"
HOW_TO_GET_IPEX = f"run `make ipex` and set {ENV_IPEX} to the absolute path of .venv-ipex/bin/python"


def kernel_names() -> list[str]:
    """Kernels that can be called in this process."""
    return sorted(_KERNELS)


def ipex_python() -> str:
    """The Python of the environment that holds IPEX.

    Raises:
        ConfigError: the environment variable ``HYBRID_IPEX_PYTHON`` names none.
    """
    path = os.environ.get(ENV_IPEX, "")
    if not path:
        raise ConfigError(f"workers.kernel: ipex needs an environment of its own: {HOW_TO_GET_IPEX}")
    if shutil.which(path) is None:
        raise ConfigError(f"workers.kernel: {ENV_IPEX}={path} is not a program: {HOW_TO_GET_IPEX}")
    return path


def kernel_name(name: str) -> str:
    """What ``auto`` stands for here; any other name stands for itself."""
    if name != "auto":
        return name
    return "native" if cpu.available() else "torch"


def resolve_kernel(name: str) -> PartialKernel:
    """The kernel called ``name``; ``auto`` is the fastest one that runs here, and what stands in for ``ipex`` here.

    Raises:
        ConfigError: no such kernel, or it does not run on this machine.
    """
    if name == IPEX:
        ipex_python()  # refuses with a reason where there is none
        name = "auto"
    name = kernel_name(name)
    if name == "native" and (reason := cpu.why_unavailable()):
        raise ConfigError(f"workers.kernel: {reason}")
    if name not in _KERNELS:
        known = ", ".join(sorted([*_KERNELS, IPEX]))
        raise ConfigError(f"workers.kernel: unknown kernel {name!r}; known are auto, {known}")
    return _KERNELS[name]
