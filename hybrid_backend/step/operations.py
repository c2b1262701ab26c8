"""The choice of the implementation of `Operations` and of FlashInfer for a device tier."""

from __future__ import annotations

import logging
from importlib import import_module
from types import ModuleType
from typing import cast

import torch

from hybrid_backend.attention import flashinfer
from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.workers import kernel_name

_log = logging.getLogger(__name__)


def operations_name(config: HybridConfig, device: torch.device) -> str:
    """Return the implementation that ``device_kernels`` means on ``device``: ``torch``, ``native`` or ``triton``."""
    if config.device_kernels == "flashinfer":
        return "triton"  # FlashInfer computes attention only; Triton runs all other operations.
    if config.device_kernels != "auto":
        return config.device_kernels
    if device.type == "cuda":
        return "triton"
    return "native" if kernel_name(config.workers.kernel) == "native" else "torch"


def are_launches(config: HybridConfig, device: torch.device) -> bool:
    """Tell whether operations are kernel launches in the device's stream, for which the host does not wait.

    Kernels then also send the requests to the CPU workers, so that a CUDA graph can capture a step.
    """
    return operations_name(config, device) == "triton"


def check_operations(config: HybridConfig, device: torch.device) -> None:
    """Raise ConfigError for an implementation that the device tier ``device`` cannot run.

    The check needs neither Triton for a GPU nor the native kernels, because a plan may be made for another machine:
    `check_this_machine` looks for these.
    """
    name = operations_name(config, device)
    if config.device_kernels == "flashinfer" and device.type != "cuda":
        raise ConfigError(
            f"device_kernels: flashinfer needs a GPU, but the device tier is the {device.type}; write auto"
        )
    if device.type == "cuda" and name != "triton":
        raise ConfigError(f"device_kernels: {name} does not run on a GPU; write auto, flashinfer or triton")
    if name == "triton" and device.type != "cuda" and not _triton().knobs.runtime.interpret:
        raise ConfigError(
            f"device_kernels: triton needs a GPU, but the device tier is the {device.type}; write auto "
            "(or set TRITON_INTERPRET=1, which runs them slowly, for tests)"
        )


def check_this_machine(config: HybridConfig, device: torch.device) -> None:
    """Raise ConfigError where the configuration asks for the native kernels and this machine does not run them."""
    if operations_name(config, device) == "native" and (reason := cpu.why_unavailable()):
        raise ConfigError(f"device_kernels: {reason}")


def resolve_operations(config: HybridConfig, device: torch.device) -> Operations:
    """Return the implementation of the operations for ``device``.

    Raises:
        ConfigError: the implementation cannot run on this machine.
    """
    check_operations(config, device)
    check_this_machine(config, device)
    name = operations_name(config, device)
    if name == "triton":
        _triton()
    module = {"torch": "oracle", "native": "cpu.operations", "triton": "triton.operations"}[name]
    return cast(Operations, import_module(f"hybrid_backend.kernels.{module}"))


def check_shape(config: HybridConfig, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> str:
    """Check that the native CPU kernels serve the attention shape of one rank, if the configuration uses them.

    Returns:
        The unsupported shape as text for a log line; empty if the native kernels serve the shape or are not used.

    Raises:
        ConfigError: the shape is unsupported and the configuration names the native kernels. A GPU always needs them.
    """
    if kernel_name(config.workers.kernel) != "native" or cpu.decodes(heads, kv_heads, head_dim, config.page_size):
        return ""
    shape = f"{heads} query heads on {kv_heads} KV heads of {head_dim}"
    has = "they have at most 16 query heads per KV head, and head sizes of 16 to 512 in steps of 16"
    if device.type == "cuda":
        raise ConfigError(
            f"workers.kernel: no CPU kernel serves {shape} ({has}); use the engine's own backend for this model"
        )
    for key, kernels in (("workers.kernel", config.workers.kernel), ("device_kernels", config.device_kernels)):
        if kernels == "native":
            raise ConfigError(f"{key}: native has no kernels for {shape} ({has}); write auto or torch")
    return f"{shape} ({has})"


def fitted(config: HybridConfig, model: ModelSpec, device: torch.device) -> HybridConfig:
    """Return ``config`` with PyTorch kernels if the native CPU kernels do not serve the model's shape.

    Raises:
        ConfigError: the configuration does not allow PyTorch kernels instead (`check_shape`).
    """
    unsupported = check_shape(config, model.num_heads, model.num_kv_heads, model.head_dim, device)
    if not unsupported:
        return config
    _log.warning("PyTorch attends, slowly: the native kernels have none for %s", unsupported)
    return config.model_copy(update={"workers": config.workers.model_copy(update={"kernel": "torch"})})


def flashinfer_bytes(config: HybridConfig, model: ModelSpec, device: torch.device) -> int:
    """Return the device memory that FlashInfer allocates, in bytes; 0 if FlashInfer is not used.

    A plan for the GPU of another machine assumes that FlashInfer is installed on that machine if it is installed here.
    """
    if device.type != "cuda" or config.device_kernels not in ("auto", "flashinfer") or flashinfer.why_unfit(model):
        return 0
    is_used = config.device_kernels == "flashinfer" or flashinfer.is_installed()
    return flashinfer.device_bytes() if is_used else 0


def resolve_flashinfer(
    config: HybridConfig, model: ModelSpec, operations: Operations, device: torch.device
) -> flashinfer.FlashInfer | None:
    """Return FlashInfer if ``device_kernels`` is ``flashinfer``, or ``auto`` and FlashInfer works on this GPU.

    None means that Triton and PyTorch compute attention. A log line gives the reason.

    Raises:
        ConfigError: ``device_kernels`` is ``flashinfer`` and FlashInfer cannot be used.
    """
    if device.type != "cuda" or config.device_kernels not in ("auto", "flashinfer"):
        return None
    result: flashinfer.FlashInfer | str = "it is not installed"
    if config.device_kernels == "flashinfer" or flashinfer.is_installed():
        result = flashinfer.FlashInfer.try_create(operations, model, device)
    if isinstance(result, flashinfer.FlashInfer):
        _log.info("FlashInfer attends prompts, and decoding rows outside of graphs")
        return result
    if config.device_kernels == "flashinfer":
        raise ConfigError(
            f"device_kernels: flashinfer cannot be used: {result}; {flashinfer.FIX}, or write auto or triton"
        )
    level = logging.WARNING if flashinfer.is_installed() else logging.INFO
    _log.log(level, "Triton and PyTorch attend, not FlashInfer: %s; %s", result, flashinfer.FIX)
    return None


def _triton() -> ModuleType:
    """Import Triton. Only a process that runs kernels calls this function; a memory plan does not.

    Raises:
        ConfigError: Triton is not installed.
    """
    try:
        import triton
    except ImportError as error:
        raise ConfigError(
            f"device_kernels: triton needs Triton, which cannot be imported here ({error}); pip install triton"
        ) from None
    return cast(ModuleType, triton)
