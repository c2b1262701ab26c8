"""Pinned host memory for a GPU: huge pages on the GPU's NUMA node, pinned in chunks."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware.machines import PCIE_EFFICIENCY

_CHUNK_BYTES = 1 << 30  # Bytes pinned at a time. Pinning 10 GiB takes seconds, and each chunk reports progress.
_PIECE_BYTES = 32 << 20  # Bytes that a thread zeroes at a time.
_MAX_THREADS = 16
_HUGE_PAGE_BYTES = 2 << 20
_MPOL_PREFERRED, _MPOL_BIND = 1, 2
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HostMemory:
    """Zeroed host memory in huge pages, if the kernel supports huge pages.

    Args:
        nbytes: size in bytes.
        node: NUMA node that the memory is placed on; None for any node.
        pin: register the memory with CUDA, which gives it the same address on the device.
        progress: function that is called with the number of bytes that are ready so far.
        strict: raise if the memory cannot be bound to ``node``. Otherwise a refusal (as in a container without
            SYS_NICE) is a warning, and the kernel uses other nodes when ``node`` is full.

    Raises:
        ConfigError: the memory cannot be mapped, bound to ``node`` or pinned.
    """

    def __init__(
        self,
        nbytes: int,
        node: int | None = None,
        pin: bool = False,
        progress: Callable[[int], None] | None = None,
        strict: bool = True,
    ) -> None:
        size = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._pinned: list[int] = []
        # An engine that fails at start must unpin its memory. Otherwise CUDA takes the next mapping at these addresses
        # for pinned, and refuses copies that cross the end of the old pinned range.
        weakref.finalize(self, _unpin, self._pinned).atexit = False
        try:
            # The mapping is private, because shared memory is in tmpfs, where the kernel has huge pages off by default.
            self._map = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(f"host_pool.size: {nbytes} bytes cannot be mapped: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if pin:
            # After a fork, the first process that writes to a page gets a new copy of the page. If this process were
            # the first, the device would still use the old page. So a child process does not get the pool.
            self._map.madvise(mmap.MADV_DONTFORK)
        whole = torch.frombuffer(self._map, dtype=torch.int8)
        aligned = -whole.data_ptr() % _HUGE_PAGE_BYTES
        self.tensor: Tensor = whole[aligned : aligned + size][:nbytes]
        if node is not None:
            refused = _place(whole.data_ptr() + aligned, size, node, _MPOL_BIND if strict else _MPOL_PREFERRED)
            if refused and strict:
                raise ConfigError(f"workers.numa: memory cannot be bound to NUMA node {node}: {refused}; write auto")
            if refused:
                logging.getLogger(__name__).warning(
                    "workers.numa: auto: the host pool cannot be put on NUMA node %d, which its GPU hangs on (%s); it "
                    "lies where the kernel likes, and may be read slower. Docker: --cap-add SYS_NICE; Kubernetes: "
                    "securityContext.capabilities.add: [SYS_NICE]",
                    node,
                    refused,
                )
        with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
            for first in range(0, size, _CHUNK_BYTES):
                part = whole[aligned + first : aligned + min(size, first + _CHUNK_BYTES)]
                # Writing zeros makes the kernel allocate the pages on the bound node. A thread writes 3 GiB/s.
                list(threads.map(_zero, part.split(_PIECE_BYTES)))
                if pin:
                    self._pin(part)
                if progress is not None:
                    progress(min(nbytes, first + len(part)))

    def _pin(self, part: Tensor) -> None:
        """Pin a chunk. If CUDA refuses, unpin all chunks and raise ConfigError."""
        status = int(torch.cuda.cudart().cudaHostRegister(part.data_ptr(), part.nbytes, _PORTABLE_MAPPED))
        if status:
            done = len(self._pinned) * _CHUNK_BYTES / 2**30
            self.close()
            raise ConfigError(
                f"host_pool.size: CUDA pinned {done:.0f} GiB and no more (error {status}); choose a smaller size, or "
                "raise the limit of locked memory (ulimit -l unlimited; in a container --ulimit memlock=-1)"
            )
        self._pinned.append(part.data_ptr())

    def close(self) -> None:
        """Unpin the memory. The memory is freed with the last tensor that uses it."""
        _unpin(self._pinned)


def _zero(part: Tensor) -> None:
    ctypes.memset(part.data_ptr(), 0, part.nbytes)  # `Tensor.zero_` would start threads of its own.


def _unpin(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
    addresses.clear()


def node_of_gpu(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node that a GPU is attached to; None if the system does not report one."""
    return node_of_pci(*_address(device), devices)


def node_of_pci(domain: int, bus: int, device: int, devices: Path) -> int | None:
    """Return the NUMA node of a PCI device (``bus`` -1: unknown); None if the folder ``devices`` does not have one."""
    path = _folder(domain, bus, device, devices) / "numa_node"
    if bus < 0 or not path.exists():
        return None
    node = int(path.read_text())
    return node if node >= 0 else None


def bus_of_gpu(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> float | None:
    """Return the rate of page copies over a GPU's PCIe link in bytes/s; None if the system does not report the link."""
    return bus_of_pci(*_address(device), devices)


def bus_of_pci(domain: int, bus: int, device: int, devices: Path) -> float | None:
    """Return the rate of page copies of a PCI device in bytes/s; None if ``devices`` does not describe its link."""
    folder = _folder(domain, bus, device, devices)
    try:
        # The GPU's highest speed is read, because an idle link reports a lower one. A slower slot goes unnoticed.
        speed, lanes = (folder / "max_link_speed").read_text(), int((folder / "current_link_width").read_text())
    except (OSError, ValueError):
        return None
    transfers = re.match(r"([\d.]+) GT/s", speed)  # The file reads, for example, "32.0 GT/s PCIe".
    if transfers is None or not lanes:
        return None
    return float(transfers[1]) * 1e9 / 8 * 128 / 130 * lanes * PCIE_EFFICIENCY


def _address(device: torch.device) -> tuple[int, int, int]:
    """Return the PCI domain, bus and device of a GPU. Bus -1 means that CUDA does not report the address."""
    properties: Any = torch.cuda.get_device_properties(device)
    return (
        getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_bus_id", -1),
        getattr(properties, "pci_device_id", 0),
    )  # fmt: skip


def _folder(domain: int, bus: int, device: int, devices: Path) -> Path:
    return devices / f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _place(address: int, size: int, node: int, policy: int) -> str | None:
    """Bind an address range to a NUMA node by mbind(2). Return the reason of a refusal, None on success."""
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return f"the system call is not known on {platform.machine()}"
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(policy), mask)
    # mbind(2) expects the number of bits plus one.
    if libc.syscall(number, *arguments, ctypes.c_ulong(len(mask) * 64 + 1), ctypes.c_uint(0)):
        return os.strerror(ctypes.get_errno())
    return None
