"""Checks of memory: available RAM and the container's limit, shared memory, pinned memory, huge pages."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hybrid_backend.config import format_size
from hybrid_backend.doctor.finding import Finding, unknown

LEAST_RAM = 4 * 2**30  # a general figure: the engine's processes and a small model
LEAST_SHM = 2**30  # Docker's default is 64 MiB, which engines with several processes overrun
UNLIMITED = -1  # of resource.getrlimit


def check_ram(wanted: int | None, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Available memory against ``host_pool.size`` (``wanted`` bytes, None: auto, half of what is available)."""
    try:
        meminfo = (proc / "meminfo").read_text()
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
        if match is None:
            raise ValueError("no MemAvailable in meminfo")
    except (OSError, ValueError) as error:
        return unknown("RAM", error, "look with `free -g`, and set host_pool.size")
    available = int(match[1]) * 1024
    found = f"{_gib(available)} available"
    left = _cgroup_left(proc, cgroup)
    if left is not None and left < available:
        available, found = left, f"{_gib(left)} left under the container's limit, {found} on the machine"
    if wanted is not None and wanted > available:
        fix = f"set host_pool.size to less than {_gib(available)}, or give the container more memory"
        return Finding("RAM", "problem", f"{found}; host_pool.size wants {format_size(wanted)}", fix)
    if available < LEAST_RAM:
        return Finding("RAM", "warning", found, f"free some: below {_gib(LEAST_RAM)} a small model may not start")
    pool = f"{_gib(available // 2)} (auto)" if wanted is None else str(format_size(wanted))
    return Finding("RAM", "ok", f"{found}; host pool {pool}")


def _cgroup_left(proc: Path, root: Path) -> int | None:
    """Bytes that this process's control group may still take: version 2, then 1; None where it has no limit."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        lines = []
    left = []
    for controllers, version, limit, used in (
        ("", "", "memory.max", "memory.current"),
        ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        paths = [path for _, names, path in (x for x in lines if len(x) == 3) if controllers in names.split(",")]
        for folder in {root / version, *(root / version / path.lstrip("/") for path in paths)}:
            try:
                most = (folder / limit).read_text().strip()
                if most.isdigit() and int(most) < 2**60:  # version 1 writes "none" as a number near 2^63
                    left.append(max(0, int(most) - int((folder / used).read_text()) + _cache(folder)))
            except (OSError, ValueError):
                continue
    return min(left, default=None)


def _cache(folder: Path) -> int:
    """File cache that counts as used, but which the kernel gives up under pressure."""
    try:
        match = re.search(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def check_shm(path: Path = Path("/dev/shm"), least: int = LEAST_SHM) -> Finding:
    """Shared memory, over which an engine's processes talk."""
    fix = "start the container with --shm-size=2g (compose: shm_size: 2gb) or --ipc=host"
    try:
        there = os.statvfs(path)
    except FileNotFoundError:
        return Finding("shared memory", "problem", f"{path} is missing", fix)
    except OSError as error:
        return unknown("shared memory", error, fix)
    total = there.f_frsize * there.f_blocks
    found = f"{_gib(there.f_frsize * there.f_bavail)} free of {_gib(total)}"
    if there.f_frsize * there.f_bavail < least:
        more = "remove old files in it" if total >= least else fix
        return Finding("shared memory", "warning", f"{found}: several ranks or workers.kernel ipex need more", more)
    return Finding("shared memory", "ok", found)


def check_memlock(soft_limit: int, gpu: bool, wanted: int | None) -> Finding:
    """`ulimit -l` against the host pool, which is pinned where there is a GPU.

    ``soft_limit``: bytes, -1 for unlimited (`resource.getrlimit`); ``wanted``: bytes of the host pool, None for auto.
    """
    told = "unlimited" if soft_limit == UNLIMITED else _gib(soft_limit)
    if not gpu:
        return Finding("pinned memory", "ok", f"limit {told}; nothing is pinned without a GPU")
    if soft_limit == UNLIMITED or (wanted is not None and soft_limit >= wanted):
        return Finding("pinned memory", "ok", f"limit {told}")
    fix = "docker run --ulimit memlock=-1; elsewhere `ulimit -l unlimited` or LimitMEMLOCK=infinity in the service"
    pool = "the host pool" if wanted is None else f"the host pool of {format_size(wanted)}"
    return Finding("pinned memory", "warning", f"limit {told} is less than {pool}, which is pinned", fix)


def check_huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Finding:
    """Transparent huge pages: page tables of a pool of many GiB miss the TLB less with them."""
    try:
        match = re.search(r"\[(\w+)\]", path.read_text())
        if match is None:
            raise ValueError(f"{path} names no mode")
    except (OSError, ValueError) as error:
        return unknown("huge pages", error, "a kernel with transparent huge pages reads a large pool faster")
    mode = match[1]
    if mode == "never":
        return Finding("huge pages", "warning", "transparent huge pages: never", f"echo madvise | sudo tee {path}")
    asks = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    if mode == "madvise" and not asks:
        return Finding("huge pages", "ok", "transparent huge pages: madvise (torch asks with THP_MEM_ALLOC_ENABLE=1)")
    return Finding("huge pages", "ok", f"transparent huge pages: {mode}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
