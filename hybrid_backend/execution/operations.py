"""Which implementation of the operations runs on a device tier."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import cast

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.workers import kernel_name


def operations_name(config: HybridConfig, device: torch.device) -> str:
    """``torch``, ``native`` or ``triton``: what ``device_kernels`` stands for on this device tier."""
    if config.device_kernels != "auto":
        return config.device_kernels
    if device.type == "cuda":
        return "triton"
    return "native" if kernel_name(config.workers.kernel) == "native" else "torch"


def are_launches(config: HybridConfig, device: torch.device) -> bool:
    """Whether operations run in the device's stream, on which the host does not wait: the device then asks the CPU
    workers by itself, and a CUDA graph can hold a step."""
    return operations_name(config, device) == "triton"


def check_operations(config: HybridConfig, device: torch.device) -> None:
    """Raise ConfigError for an implementation that this device tier cannot run. A GPU may be one of another machine: no
    Triton is needed to plan for it."""
    name = operations_name(config, device)
    if device.type == "cuda" and name != "triton":
        raise ConfigError(f"device_kernels: {name} does not run on a GPU; write auto or triton")
    if name == "native" and (reason := cpu.why_unavailable()):
        raise ConfigError(f"device_kernels: {reason}")
    if name == "triton" and device.type != "cuda" and not _triton().knobs.runtime.interpret:
        raise ConfigError(
            f"device_kernels: triton needs a GPU, but the device tier is the {device.type}; write auto "
            "(or set TRITON_INTERPRET=1, which runs them slowly, for tests)"
        )


def resolve_operations(config: HybridConfig, device: torch.device) -> Operations:
    """The implementation to run.

    Raises:
        ConfigError: it cannot run here.
    """
    check_operations(config, device)
    name = operations_name(config, device)
    if name == "triton":
        _triton()
    module = {"torch": "oracle", "native": "cpu.operations", "triton": "triton.operations"}[name]
    return cast(Operations, import_module(f"hybrid_backend.kernels.{module}"))


def _triton() -> ModuleType:
    """Imported where kernels will run, not where their memory is planned.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import triton
    except ImportError as error:
        raise ConfigError(
            f"device_kernels: triton needs Triton, which cannot be imported here ({error}); pip install triton"
        ) from None
    return cast(ModuleType, triton)
