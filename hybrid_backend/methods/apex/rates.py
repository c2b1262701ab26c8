"""APEX's N_G and N_C of this machine, measured at start: the rates of attention on the device and on the CPU workers.

The paper profiles offline (arXiv 2506.03296, section 3.4). Both measurements attend scattered pages of the tiers that
will be served, with the kernels that will serve, and take some milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList
from hybrid_backend.batch import ModelSpec
from hybrid_backend.hardware import Hardware
from hybrid_backend.hardware.spec import Curve
from hybrid_backend.hardware.timing import seconds_of
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers import Tiers
from hybrid_backend.workers import WorkerPool

ROWS = 8
"""Sequences that are attended at once."""
LEAST_BYTES, MOST_BYTES = 16 << 20, 256 << 20
"""K and V that one measurement reads. Fewer lie in caches, and their rate says nothing."""
ROUNDS = 3
"""Measurements of each rate, of which the fastest counts. One more, before them, loads kernels."""
_SOURCE = "measured at start"


def measured_rates(
    hardware: Hardware, model: ModelSpec, tiers: Tiers, workers: WorkerPool, deadline: float
) -> Hardware:
    """Return the machine with measured rates of attention; a tier that is too small keeps the machine's own rate.

    Args:
        hardware: the machine that the GPU's name stands for.
        model: shapes of the model.
        tiers: memory that is attended: frames of the device, and the host pool.
        workers: the CPU workers.
        deadline: longest wait for the CPU workers, in seconds.
    """
    layer, frames = next(iter(tiers.frames.layers.items()))
    on_cpu = cpu_rate(model, tiers.host.layers[layer], workers, deadline)
    if on_cpu is not None:
        curve = Curve(points=((workers.threads, on_cpu),), source=_SOURCE)
        hardware = hardware.replace(
            cpu_attention_bytes_per_s=curve, host_read_bytes_per_s=curve, cores=workers.threads, gpus=1
        )
    on_device = device_rate(model, frames, tiers.operations)
    if on_device is not None:
        curve = Curve(points=((ROWS, on_device),), source=_SOURCE)
        hardware = hardware.replace(device_attention_bytes_per_s=curve)
    return hardware


def cpu_rate(model: ModelSpec, layer: Tensor, workers: WorkerPool, deadline: float) -> float | None:
    """Return the bytes of K and V that the workers attend per second; None if the layer is too small to measure.

    Args:
        model: shapes of the model.
        layer: ``[pages, kv_heads, 2, page_size, head_dim]`` of the host pool.
        workers: the CPU workers.
        deadline: longest wait in seconds.

    Raises:
        WorkerError: the workers failed, or were late.
    """
    ids = _scattered(layer)
    if ids is None:
        return None
    q = torch.zeros(ROWS, model.num_heads, model.head_dim, dtype=model.dtype)
    pages = PageList(ids, torch.full_like(ids, layer.shape[3]))

    def attend() -> None:
        workers.submit(q, layer, pages, model.scale, "the measurement of apex.hardware: auto").wait(deadline)

    return ids.numel() * layer[0].nbytes / _fastest(attend, layer.device)


def device_rate(model: ModelSpec, layer: Tensor, operations: Operations) -> float | None:
    """Return the bytes of K and V that the device attends per second; None if the layer is too small to measure.

    Args:
        model: shapes of the model.
        layer: ``[frames, kv_heads, 2, page_size, head_dim]`` of the device tier.
        operations: the operations that serve.
    """
    ids = _scattered(layer)
    if ids is None:
        return None
    device, page_size = layer.device, layer.shape[3]
    q = torch.zeros(ROWS, model.num_heads, model.head_dim, dtype=model.dtype, device=device)
    frames = ids.int().to(device)
    tokens = torch.full((ROWS, 1), ids.shape[2] * page_size, dtype=torch.int32, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    num_parts = operations.parts_for(ROWS, layer.shape[1], ids.shape[2] * page_size, processors)

    def attend() -> None:
        operations.paged_partial(q, layer, frames, tokens, model.scale, num_parts)

    return ids.numel() * layer[0].nbytes / _fastest(attend, device)


def _scattered(layer: Tensor) -> Tensor | None:
    """Return scattered pages of a layer, ``[ROWS, 1, n]`` int64; None if the layer has too few."""
    pages = min(len(layer), MOST_BYTES // layer[0].nbytes) // ROWS * ROWS if len(layer) else 0
    if not pages or pages * layer[0].nbytes < LEAST_BYTES:
        return None
    return torch.randperm(len(layer))[:pages].view(ROWS, 1, -1)


def _fastest(run: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of the fastest of some runs, with the device's work."""
    run()
    return min(seconds_of(device, run) for _ in range(ROUNDS))
