"""Checks of memory: available RAM and the container's limit, shared memory, pinned memory, huge pages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hybrid_backend.config import format_size
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import System, check_pool, room, size_text
from hybrid_backend.tools.doctor.finding import Finding, unknown

LEAST_RAM = 4 * 2**30  # a general figure: the engine's processes and a small model
LEAST_SHM = 2**30  # Docker's default is 64 MiB, which engines with several processes overrun
UNLIMITED = -1  # of resource.getrlimit


def check_ram(
    wanted: int | None, key: str = "host_pool.size", nodes: Sequence[int | None] = (None,), system: System | None = None
) -> Finding:
    """Memory against the host pool, by the rule that the engines start with; of the model's weights nothing is known
    here.

    Args:
        wanted: bytes of the pool, None: auto, half of what the weights leave.
        key: where ``wanted`` was written.
        nodes: for each rank the NUMA node that its engine takes memory from, None for any.
    """
    try:
        here = room(system or System(), nodes, uncached=None if nodes[0] is None else 0)
    except ConfigError as error:
        return unknown("RAM", error, "look with `free -g`, and set host_pool.size")
    found = f"{size_text(here.place.free)} {here.place.name}"
    if wanted is not None:
        try:
            check_pool(key, wanted, here)
        except ConfigError as error:
            return Finding("RAM", "problem", found, str(error))
    if here.place.free < LEAST_RAM:
        fix = f"free some: below {size_text(LEAST_RAM)} a small model may not start"
        return Finding("RAM", "warning", found, fix)
    pool = f"{size_text(here.auto)} (auto, less half of the weights)" if wanted is None else str(format_size(wanted))
    return Finding("RAM", "ok", f"{found}; host pool {pool}")


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
    found = f"{size_text(there.f_frsize * there.f_bavail)} free of {size_text(total)}"
    if there.f_frsize * there.f_bavail < least:
        more = "remove old files in it" if total >= least else fix
        return Finding("shared memory", "warning", f"{found}: several ranks or workers.kernel ipex need more", more)
    return Finding("shared memory", "ok", found)


def check_memlock(soft_limit: int, gpu: bool, wanted: int | None) -> Finding:
    """`ulimit -l` against the host pool, which is pinned where there is a GPU.

    ``soft_limit``: bytes, -1 for unlimited (`resource.getrlimit`); ``wanted``: bytes of the host pool, None for auto.
    """
    limit = "unlimited" if soft_limit == UNLIMITED else size_text(soft_limit)
    if not gpu:
        return Finding("pinned memory", "ok", f"limit {limit}; nothing is pinned without a GPU")
    if soft_limit == UNLIMITED or (wanted is not None and soft_limit >= wanted):
        return Finding("pinned memory", "ok", f"limit {limit}")
    fix = "docker run --ulimit memlock=-1; elsewhere `ulimit -l unlimited` or LimitMEMLOCK=infinity in the service"
    pool = "the host pool" if wanted is None else f"the host pool of {format_size(wanted)}"
    return Finding("pinned memory", "warning", f"limit {limit} is less than {pool}, which is pinned", fix)


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
