"""Checks of memory: RAM, shared memory, pinned memory, huge pages."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from hybrid_backend.config import format_size
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import System, check_pool, room, size_text
from hybrid_backend.tools.doctor.finding import Finding, unknown

LEAST_RAM = 4 * 2**30
"""General figure for the engine's processes and a small model."""
LEAST_SHM = 2**30
"""Docker's default is 64 MiB, which is too little for engines with several processes."""
UNLIMITED = -1
"""Value of `resource.getrlimit`."""


def check_ram(
    pool_bytes: int | None,
    key: str = "host_pool.size",
    nodes: Sequence[int | None] = (None,),
    system: System | None = None,
) -> Finding:
    """Check the host pool against the memory, by the rule of the engines' start. The model's weights are not known.

    Args:
        pool_bytes: size of the pool; None for auto, which is half of what the weights leave.
        key: key or variable in which the size was written.
        nodes: NUMA node of each rank's memory; None for any node.
        system: replaces /proc and /sys.
    """
    try:
        memory = room(system or System(), nodes, uncached=None if nodes[0] is None else 0)
    except ConfigError as error:
        return unknown("RAM", error, "look with `free -g`, and set host_pool.size")
    text = f"{size_text(memory.place.free)} {memory.place.name}"
    if pool_bytes is not None:
        try:
            check_pool(key, pool_bytes, memory)
        except ConfigError as error:
            return Finding("RAM", "problem", text, str(error))
    if memory.place.free < LEAST_RAM:
        fix = f"free some: below {size_text(LEAST_RAM)} a small model may not start"
        return Finding("RAM", "warning", text, fix)
    auto = f"{size_text(memory.auto)} (auto, less half of the weights)"
    return Finding("RAM", "ok", f"{text}; host pool {auto if pool_bytes is None else format_size(pool_bytes)}")


def check_shm(path: Path = Path("/dev/shm"), least: int = LEAST_SHM) -> Finding:
    """Check the shared memory, through which the processes of an engine communicate."""
    fix = "start the container with --shm-size=2g (compose: shm_size: 2gb) or --ipc=host"
    try:
        total, _, free = shutil.disk_usage(path)
    except FileNotFoundError:
        return Finding("shared memory", "problem", f"{path} is missing", fix)
    except OSError as error:
        return unknown("shared memory", error, fix)
    text = f"{size_text(free)} free of {size_text(total)}"
    if free < least:
        fix = "remove old files in it" if total >= least else fix
        return Finding("shared memory", "warning", f"{text}: several ranks or workers.kernel ipex need more", fix)
    return Finding("shared memory", "ok", text)


def check_memlock(soft_limit: int, has_gpu: bool, pool_bytes: int | None) -> Finding:
    """Check `ulimit -l` against the host pool, which is pinned on a machine with a GPU.

    Args:
        soft_limit: bytes, -1 for unlimited.
        has_gpu: the pool is pinned.
        pool_bytes: size of the pool; None for auto.
    """
    limit = "unlimited" if soft_limit == UNLIMITED else size_text(soft_limit)
    if not has_gpu:
        return Finding("pinned memory", "ok", f"limit {limit}; nothing is pinned without a GPU")
    if soft_limit == UNLIMITED or (pool_bytes is not None and soft_limit >= pool_bytes):
        return Finding("pinned memory", "ok", f"limit {limit}")
    fix = "docker run --ulimit memlock=-1; elsewhere `ulimit -l unlimited` or LimitMEMLOCK=infinity in the service"
    pool = "the host pool" if pool_bytes is None else f"the host pool of {format_size(pool_bytes)}"
    return Finding("pinned memory", "warning", f"limit {limit} is less than {pool}, which is pinned", fix)


def check_huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Finding:
    """Check transparent huge pages, with which reading a large pool misses the TLB less often."""
    try:
        match = re.search(r"\[(\w+)\]", path.read_text())
        if match is None:
            raise ValueError(f"{path} names no mode")
    except (OSError, ValueError) as error:
        return unknown("huge pages", error, "a kernel with transparent huge pages reads a large pool faster")
    mode = match[1]
    if mode == "never":
        return Finding("huge pages", "warning", "transparent huge pages: never", f"echo madvise | sudo tee {path}")
    is_unused = mode == "madvise" and os.environ.get("THP_MEM_ALLOC_ENABLE") != "1"
    hint = " (torch asks with THP_MEM_ALLOC_ENABLE=1)" if is_unused else ""
    return Finding("huge pages", "ok", f"transparent huge pages: {mode}{hint}")
