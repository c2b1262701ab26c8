"""Host memory that a GPU reads and writes by itself: huge pages on the GPU's NUMA node, pinned chunk by chunk."""

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

_CHUNK = 1 << 30  # bytes pinned at a time: pinning takes seconds per ten GiB, and somebody watches
_PIECE = 32 << 20  # bytes that a thread zeroes at a time
_THREADS = 16
_HUGE_PAGE = 2 << 20
_MPOL_PREFERRED, _MPOL_BIND = 1, 2
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HostMemory:
    """``nbytes`` of zeroed memory, in huge pages where the kernel has them.

    Args:
        nbytes: size; rounded up to huge pages.
        node: NUMA node that it shall lie on, None for any.
        strict: it must lie there. Else the kernel takes other nodes once that one is full, and a container that
            forbids the call is warned of.
        pin: register it with CUDA, which gives it the same address on the device.
        progress: called with the bytes that are ready so far.

    Raises:
        ConfigError: the memory, or memory of that node, cannot be had or pinned.
    """

    def __init__(
        self,
        nbytes: int,
        node: int | None = None,
        pin: bool = False,
        progress: Callable[[int], None] | None = None,
        strict: bool = True,
    ) -> None:
        size = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        self._pinned: list[int] = []
        # For engines that die while they start: what is mapped here next would pass for pinned, and CUDA refuses to
        # copy what does not lie in one pinned range.
        weakref.finalize(self, _unpin, self._pinned).atexit = False
        try:
            # Private: memory that is shared among processes is the kernel's tmpfs, for which huge pages are off.
            self._map = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(f"host_pool.size: {nbytes} bytes cannot be mapped: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if pin:
            # A process that forks shares its pages until somebody writes, and the writer gets a copy. That may be this
            # process, while the device keeps the page that it knows. A child has no use for the pool.
            self._map.madvise(mmap.MADV_DONTFORK)
        whole = torch.frombuffer(self._map, dtype=torch.int8)
        aligned = -whole.data_ptr() % _HUGE_PAGE
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
        with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as threads:
            for first in range(0, size, _CHUNK):
                part = whole[aligned + first : aligned + min(size, first + _CHUNK)]
                # The kernel finds the pages now, on the node that they are bound to. A thread does 3 GiB a second.
                list(threads.map(_zero, part.split(_PIECE)))
                if pin:
                    self._pin(part)
                if progress is not None:
                    progress(min(nbytes, first + len(part)))

    def _pin(self, part: Tensor) -> None:
        status = int(torch.cuda.cudart().cudaHostRegister(part.data_ptr(), part.nbytes, _PORTABLE_MAPPED))
        if status:
            done = len(self._pinned) * _CHUNK / 2**30
            self.close()
            raise ConfigError(
                f"host_pool.size: CUDA pinned {done:.0f} GiB and no more (error {status}); choose a smaller size, or "
                "raise the limit of locked memory (ulimit -l unlimited; in a container --ulimit memlock=-1)"
            )
        self._pinned.append(part.data_ptr())

    def close(self) -> None:
        """Unpin it. The memory itself goes when the last tensor over it does."""
        _unpin(self._pinned)


def _zero(part: Tensor) -> None:
    ctypes.memset(part.data_ptr(), 0, part.nbytes)  # in this thread alone


def _unpin(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
    addresses.clear()


def node_of_gpu(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """NUMA node that a GPU hangs on; None where the machine does not say."""
    return node_of_pci(*_address(device), devices)


def node_of_pci(domain: int, bus: int, device: int, devices: Path) -> int | None:
    path = _folder(domain, bus, device, devices) / "numa_node"
    if bus < 0 or not path.exists():
        return None
    node = int(path.read_text())
    return node if node >= 0 else None


def bus_of_gpu(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> float | None:
    """Bytes per second that pages are copied at over a GPU's PCIe link; None where the machine does not say."""
    return bus_of_pci(*_address(device), devices)


def bus_of_pci(domain: int, bus: int, device: int, devices: Path) -> float | None:
    folder = _folder(domain, bus, device, devices)
    try:
        # The GPU's highest speed, as an idle link slows down; a slot that is slower is not heeded.
        speed, lanes = (folder / "max_link_speed").read_text(), int((folder / "current_link_width").read_text())
    except (OSError, ValueError):
        return None
    found = re.match(r"([\d.]+) GT/s", speed)  # as 32.0 GT/s PCIe
    if found is None or not lanes:
        return None
    return float(found[1]) * 1e9 / 8 * 128 / 130 * lanes * PCIE_EFFICIENCY


def _address(device: torch.device) -> tuple[int, int, int]:
    """PCI domain, bus (-1: not known) and device of a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    return (
        getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_bus_id", -1),
        getattr(properties, "pci_device_id", 0),
    )  # fmt: skip


def _folder(domain: int, bus: int, device: int, devices: Path) -> Path:
    return devices / f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _place(address: int, size: int, node: int, policy: int) -> str | None:
    """mbind(2): pages of the range come from ``node``. Returns why they do not, None: they do."""
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return f"the system call is not known on {platform.machine()}"
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(policy), mask)
    # The kernel wants one more than the number of bits.
    if libc.syscall(number, *arguments, ctypes.c_ulong(len(mask) * 64 + 1), ctypes.c_uint(0)):
        return os.strerror(ctypes.get_errno())
    return None
