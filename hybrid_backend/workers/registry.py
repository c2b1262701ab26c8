"""The partial-attention kernels that CPU workers run, by the name that ``workers.kernel`` gives."""

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
    """A function with the contract of `hybrid_backend.attention.partial.paged_partial`."""

    def __call__(self, q: Tensor, layer: Tensor, pages: PageList, scale: float) -> Partial: ...


def native_partial(q: Tensor, layer: Tensor, pages: PageList, scale: float) -> Partial:
    """Run the C++ kernel in the calling thread (contract: `PartialKernel`)."""
    return Partial(*cpu.partial(q, layer, pages.ids, pages.valid, scale))


_KERNELS: Mapping[str, PartialKernel] = MappingProxyType({"native": native_partial, "torch": paged_partial})
IPEX = "ipex"
"""Name of the kernel that runs in a process of its own (`workers/ipex.py`) and cannot be called in this process."""
ENV_IPEX = "HYBRID_IPEX_PYTHON"
HOW_TO_GET_IPEX = f"run `make ipex` and set {ENV_IPEX} to the absolute path of .venv-ipex/bin/python"


def kernel_names() -> list[str]:
    """Return the names of the kernels that can be called in this process."""
    return sorted(_KERNELS)


def ipex_python() -> str:
    """Return the path of the Python interpreter whose environment has IPEX.

    Raises:
        ConfigError: the environment variable ``HYBRID_IPEX_PYTHON`` is not set, or does not name a program.
    """
    path = os.environ.get(ENV_IPEX, "")
    if not path:
        raise ConfigError(f"workers.kernel: ipex needs an environment of its own: {HOW_TO_GET_IPEX}")
    if shutil.which(path) is None:
        raise ConfigError(f"workers.kernel: {ENV_IPEX}={path} is not a program: {HOW_TO_GET_IPEX}")
    return path


def kernel_name(name: str) -> str:
    """Return the kernel that ``auto`` selects on this machine; any other name is returned unchanged."""
    if name != "auto":
        return name
    return "native" if cpu.available() else "torch"


def resolve_kernel(name: str) -> PartialKernel:
    """Return the kernel that this process calls for ``workers.kernel: name``.

    ``auto`` selects the fastest kernel that runs here. ``ipex`` selects the same kernel, because IPEX itself runs in
    another process.

    Raises:
        ConfigError: the name is unknown, or the kernel does not run on this machine.
    """
    if name == IPEX:
        ipex_python()  # Raises the error that tells the user how to install IPEX.
        name = "auto"
    name = kernel_name(name)
    if name == "native" and (reason := cpu.why_unavailable()):
        raise ConfigError(f"workers.kernel: {reason}")
    if name not in _KERNELS:
        names = ", ".join(sorted([*_KERNELS, IPEX]))
        raise ConfigError(f"workers.kernel: unknown kernel {name!r}; known are auto, {names}")
    return _KERNELS[name]
