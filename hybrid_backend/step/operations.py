"""Which implementation of the operations runs on a device tier."""

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
    """``torch``, ``native`` or ``triton``: what ``device_kernels`` stands for on this device tier."""
    if config.device_kernels == "flashinfer":
        return "triton"  # FlashInfer attends, and has none of the other operations
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
    if config.device_kernels == "flashinfer" and device.type != "cuda":
        raise ConfigError(
            f"device_kernels: flashinfer needs a GPU, but the device tier is the {device.type}; write auto"
        )
    if device.type == "cuda" and name != "triton":
        raise ConfigError(f"device_kernels: {name} does not run on a GPU; write auto, flashinfer or triton")
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


def check_shape(config: HybridConfig, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> str:
    """What native kernels, were they to run, lack for attention of this shape (one rank's), in words; empty: nothing.

    Raises:
        ConfigError: they were asked for by name, or the device tier is a GPU, whose questions only they answer.
    """
    if kernel_name(config.workers.kernel) != "native" or cpu.decodes(heads, kv_heads, head_dim, config.page_size):
        return ""
    shape = f"{heads} query heads on {kv_heads} KV heads of {head_dim}"
    has = "they have at most 16 query heads per KV head, and head sizes of 16 to 256 in steps of 16"
    if device.type == "cuda":
        raise ConfigError(
            f"workers.kernel: no CPU kernel serves {shape} ({has}); use the engine's own backend for this model"
        )
    for key, asked in (("workers.kernel", config.workers.kernel), ("device_kernels", config.device_kernels)):
        if asked == "native":
            raise ConfigError(f"{key}: native has no kernels for {shape} ({has}); write auto or torch")
    return f"{shape} ({has})"


def fitted(config: HybridConfig, model: ModelSpec, device: torch.device) -> HybridConfig:
    """``config``, with PyTorch in place of the native kernels where these have none for the model's shape.

    Raises:
        ConfigError: as `check_shape`.
    """
    lacking = check_shape(config, model.num_heads, model.num_kv_heads, model.head_dim, device)
    if not lacking:
        return config
    _log.warning("PyTorch attends, slowly: the native kernels have none for %s", lacking)
    return config.model_copy(update={"workers": config.workers.model_copy(update={"kernel": "torch"})})


def flashinfer_bytes(config: HybridConfig, model: ModelSpec, device: torch.device) -> int:
    """Device memory that FlashInfer takes. Of a GPU of another machine: as if what is installed here were there."""
    if device.type != "cuda" or config.device_kernels not in ("auto", "flashinfer") or flashinfer.unfit(model):
        return 0
    is_wanted = config.device_kernels == "flashinfer" or flashinfer.is_installed()
    return flashinfer.device_bytes() if is_wanted else 0


def resolve_flashinfer(
    config: HybridConfig, model: ModelSpec, operations: Operations, device: torch.device
) -> flashinfer.FlashInfer | None:
    """FlashInfer, if ``device_kernels`` asks for it, or is auto and it can be used: the log says what became of it.

    Raises:
        ConfigError: it was asked for and cannot be used.
    """
    if device.type != "cuda" or config.device_kernels not in ("auto", "flashinfer"):
        return None
    found: flashinfer.FlashInfer | str = "it is not installed"
    if config.device_kernels == "flashinfer" or flashinfer.is_installed():
        found = flashinfer.FlashInfer.tried(operations, model, device)
    if isinstance(found, flashinfer.FlashInfer):
        _log.info("FlashInfer attends prompts, and decoding rows outside of graphs")
        return found
    if config.device_kernels == "flashinfer":
        raise ConfigError(
            f"device_kernels: flashinfer cannot be used: {found}; {flashinfer.FIX}, or write auto or triton"
        )
    level = logging.WARNING if flashinfer.is_installed() else logging.INFO
    _log.log(level, "Triton and PyTorch attend, not FlashInfer: %s; %s", found, flashinfer.FIX)
    return None


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
