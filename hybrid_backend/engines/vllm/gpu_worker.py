"""vLLM's CUDA worker with its KV cache in pinned host memory.

vLLM has no seam for the memory of the KV cache. Both model runners allocate it by ``allocate_kv_cache``
(vllm/v1/worker/utils.py), with one ``torch.zeros(..., dtype=torch.int8)``, inside the context that
``Worker._maybe_get_memory_pool_context("kv_cache")`` returns. In this context we replace the function: it is called
once for the groups that are offloaded, whose memory is redirected, and once for each group that stays on the device
(`device_groups`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import allocate_kv_cache

from hybrid_backend.engines.vllm import GPU_WORKER
from hybrid_backend.engines.vllm.device_groups import allocate, keep_to_pools, on_device
from hybrid_backend.engines.vllm.worker import HybridWorker
from hybrid_backend.errors import EngineError
from hybrid_backend.tiers.pinned import HostMemory, node_of_gpu
from hybrid_backend.warm_up import warm_up

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from hybrid_backend.runtime import HybridRuntime

_ALLOCATING_MODULES = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")
"""Modules of the V1 and the V2 model runner that call `allocate_kv_cache` by a name of their own."""
NULL_PAGE = 0
"""First block of vLLM's pool, which no request reads (``null_block`` in v1/core/block_pool.py)."""


class HybridGPUWorker(HybridWorker, Worker):
    """vLLM's CUDA worker. The host pool is pinned memory that the device reads and writes by the same addresses.

    Attributes:
        memory: memory of the host pool.
        device_view: the same memory as a tensor of the device.
    """

    worker_cls = GPU_WORKER
    memory: HostMemory | None = None
    device_view: Tensor

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return on_device(super().get_kv_cache_spec(), self.vllm_config)

    def warm_up_kernels(self, runtime: HybridRuntime) -> None:
        """Compile and launch our Triton kernels. After its own warm-up vLLM warns of each compilation."""
        warm_up(runtime, NULL_PAGE)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if self.is_warming_up:
            keep_to_pools(scheduler_output, self.model_runner.kv_cache_config)
        return super().execute_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        if self.session is not None:
            self.session.runtime.idle()
        super().execute_dummy_batch()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag != "kv_cache":
            return super()._maybe_get_memory_pool_context(tag)
        return self._split_allocation()

    @contextmanager
    def _split_allocation(self) -> Iterator[None]:
        """Replace `allocate_kv_cache` in the context."""

        def ours(kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            return allocate(allocate_kv_cache, partial(_redirected, self._host_pool), kv_cache_config, *args, **kwargs)

        with ExitStack() as patches:
            for module in _ALLOCATING_MODULES:
                if module in sys.modules:
                    patches.enter_context(patch.object(sys.modules[module], "allocate_kv_cache", ours))
            yield

    def _host_pool(self, nbytes: int) -> Tensor:
        """Allocate the host pool, and return it as a tensor of the device."""
        if self.memory is not None:
            # vLLM allocates the KV cache twice, once only to estimate memory.
            return self.device_view[:nbytes]
        numa = self.hybrid_config.workers.numa
        node = node_of_gpu(self.device) if numa == "auto" else int(numa)
        with _progress(nbytes, f"pinning the host pool of rank {self.rank}") as advance:
            self.memory = HostMemory(nbytes, node, pin=True, progress=advance, strict=numa != "auto")
        self.device_view = get_accelerator_view_from_cpu_tensor(self.memory.tensor)
        if self.device_view.data_ptr() != self.memory.tensor.data_ptr():
            raise EngineError("this GPU sees pinned host memory at another address than the CPU; it is not supported")
        return self.device_view

    def on_host(self, view: Tensor) -> Tensor:
        if self.memory is None:
            raise EngineError("this vLLM allocated its KV cache in a way that the hybrid backend cannot redirect")
        remaining = self.memory.tensor[view.data_ptr() - self.device_view.data_ptr() :]
        whole_bytes = remaining.numel() // view.dtype.itemsize * view.dtype.itemsize
        return remaining[:whole_bytes].view(view.dtype).as_strided(view.size(), view.stride())

    def shutdown(self) -> None:
        if self.session is not None:
            # Kernels that still run wait for the CPU workers, which end below.
            torch.cuda.synchronize(self.device)
        super().shutdown()
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class _Redirect(TorchFunctionMode):
    """Replaces the device's zeroed int8 buffers by those that a function makes."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.zeros and options.get("dtype") is torch.int8 and torch.device(options["device"]).type != "cpu":
            return self._make(int(args[0]))
        return func(*args, **options)


@contextmanager
def _redirected(make: Callable[[int], Tensor]) -> Iterator[None]:
    with _Redirect(make):
        yield


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, and yield a function that takes the bytes that are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
