"""Memory that a host pool may take here: of the machine, of NUMA nodes, under a container's limit.

The one reader of /proc, control groups and NUMA nodes for that purpose: engines size and check the pool with it before
they load anything, `hybrid doctor` tells what it finds. Imports neither an engine nor torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid_backend.config import format_size
from hybrid_backend.errors import ConfigError

RESERVE = 3 << 29
"""Bytes that a rank takes beside weights and pool until the pool is made: its processes, what is compiled, activations.
vLLM's processes with SmolLM2-135M: 1.1 GiB, nothing compiled."""
_NO_LIMIT = 2**60  # version 1 of control groups writes "none" as a number near 2^63


@dataclass(frozen=True)
class Node:
    """A NUMA node. ``free``: bytes that can be had there, file cache included, as vLLM 0.32 counts them
    (vllm/utils/cpu_resource_utils.py, ``get_memory_node_info``)."""

    total: int
    free: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class System:
    """Where the kernel tells about memory."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    sys_nodes: Path = Path("/sys/devices/system/node")

    def meminfo(self, key: str) -> int:
        """Bytes, from /proc/meminfo. ConfigError: it has no such key."""
        file = self.proc / "meminfo"
        try:
            match = re.search(rf"^{key}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror}); run where /proc is mounted") from None
        if match is None:
            raise ConfigError(f"{file} has no {key}; the kernel does not tell the memory; run on Linux 3.14 or later")
        return int(match[1]) * 1024

    def available(self) -> int:
        """Bytes that this process can still use, on any node."""
        left = self.cgroup_left()
        available = self.meminfo("MemAvailable")
        return available if left is None else min(available, left)

    def cgroup_left(self) -> int | None:
        """Bytes that this process's control group and those above it may still take, file cache that the kernel gives
        up under pressure included: version 2, then 1. None where there is no limit."""
        left = []
        for folder, limit, used in self._groups():
            most = _number(folder / limit)
            if most is not None and most < _NO_LIMIT:
                left.append(max(0, most - (_number(folder / used) or 0) + _file_cache(folder)))
        return min(left, default=None)

    def _groups(self) -> Iterator[tuple[Path, str, str]]:
        """Folders of this process's control groups with the names of their files for limit and usage."""
        for controller, limit, used in (
            ("", "memory.max", "memory.current"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            for folder in self.groups(controller):
                yield folder, limit, used

    def groups(self, controller: str) -> Iterator[Path]:
        """Folders of this process's control group of a controller of version 1 ("": of version 2), and of all above."""
        try:
            lines = [line.split(":", 2) for line in (self.proc / "self/cgroup").read_text().splitlines()]
        except OSError:
            lines = []
        mine = [line[2].lstrip("/") for line in lines if len(line) == 3 and controller in line[1].split(",")]
        # Inside a container the path may be the host's, which is not there; the root is the container's own.
        paths = [Path(path) for path in (*mine, "")]
        yield from dict.fromkeys(self.cgroup / controller / above for path in paths for above in (path, *path.parents))

    def container(self) -> tuple[int, int] | None:
        """``(limit, usage)`` of the root group, as vLLM 0.32 reads it: file cache counts as used. None: no limit."""
        for folder, limit, used in (
            (self.cgroup, "memory.max", "memory.current"),
            (self.cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most = _number(folder / limit)
            if most is not None:
                return (most, _number(folder / used) or 0) if most < _NO_LIMIT else None
        return None

    def nodes(self) -> dict[int, Node]:
        """NUMA nodes by number; empty where the kernel tells of none."""
        found = {}
        for folder in sorted(self.sys_nodes.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
            try:
                lines = re.findall(r"^Node \d+ (\S+):\s+(\d+)", (folder / "meminfo").read_text(), re.MULTILINE)
                cpus = tuple(numbers((folder / "cpulist").read_text()))
            except OSError:
                continue
            size = {name: int(kib) * 1024 for name, kib in lines}
            free = sum(size.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
            found[int(folder.name[4:])] = Node(size.get("MemTotal", 0), free, cpus)
        return found

    def allowed_nodes(self) -> list[int]:
        """Nodes that this process may take memory from; empty where the kernel does not say."""
        try:
            match = re.search(r"^Mems_allowed_list:\s*(\S+)", (self.proc / "self/status").read_text(), re.MULTILINE)
        except OSError:
            return []
        return numbers(match[1]) if match else []


@dataclass(frozen=True)
class Place:
    """Where memory comes from: ``free`` bytes, of which ``ranks`` ranks take weights, ``pools`` of them a host pool."""

    name: str
    free: int
    ranks: int
    pools: int


@dataclass(frozen=True)
class Room:
    """What one rank's host pool may take, by the place that gives least."""

    most: int  # bytes that can work
    auto: int  # bytes where nobody says how many
    place: Place
    weights: int  # bytes that each rank still loads

    @property
    def why(self) -> str:
        """Where the limit comes from."""
        taken = f"{size_text(RESERVE)} for the engine"
        if self.weights:
            taken = f"{size_text(self.weights)} of weights and {taken}"
        each = f" for each of {self.place.ranks} ranks" if self.place.ranks > 1 else ""
        return f"{size_text(self.place.free)} {self.place.name}, less {taken}{each}"


def room(
    system: System, nodes: Sequence[int | None], weights: int = 0, uncached: int | None = None, reserve: int = RESERVE
) -> Room:
    """What each rank's host pool may take.

    Args:
        nodes: for each rank of this machine the NUMA node that its memory comes from, None for any.
        weights: bytes that each rank has yet to load into host memory.
        uncached: bytes of weight files that are not in the page cache yet. Given for vLLM's CPU engine, which counts
            file cache as used once a container's limit is below its node's memory. None: the engine does not look.
        reserve: bytes that each rank takes beside both.

    Returns:
        ``most`` is never negative. ``auto`` is half of what the weights leave, and never above ``most``.
    """
    places = list(_places(system, nodes, uncached))

    def left(place: Place, kept: int) -> int:
        return max(0, (place.free - place.ranks * (weights + kept)) // place.pools)

    narrow = min(places, key=lambda place: left(place, reserve))
    most = left(narrow, reserve)
    return Room(most, min(most, *(left(place, 0) // 2 for place in places)), narrow, weights)


def _places(system: System, nodes: Sequence[int | None], uncached: int | None) -> Iterator[Place]:
    ranks, there = len(nodes), system.nodes()
    yield Place("available on this machine", system.meminfo("MemAvailable"), ranks, ranks)
    left = system.cgroup_left()
    if left is not None:
        yield Place("left under the container's limit", left, ranks, ranks)
    allowed = [node for node in system.allowed_nodes() if node in there]
    if allowed and len(allowed) < len(there):
        free = sum(there[node].free for node in allowed)
        yield Place(f"on the NUMA nodes that it may use ({', '.join(map(str, allowed))})", free, ranks, ranks)
    for node, count in Counter(node for node in nodes if node is not None).items():
        if node not in there:
            continue  # the engine then reads the whole machine's memory too
        yield Place(f"available on NUMA node {node}", there[node].free, count, count)
        container = system.container()
        if uncached is not None and container is not None and container[0] < there[node].total:
            # Looked at by each rank before any of them makes its pool, hence one pool.
            left = max(0, container[0] - container[1] - uncached)
            yield Place("left under the container's limit with file cache counted as used", left, ranks, 1)


def check_pool(key: str, size: int, here: Room) -> None:
    """Raise ConfigError for a host pool of ``size`` bytes per rank that cannot be had. ``key``: who asked for it."""
    if size > here.most:
        raise ConfigError(
            f"{key}: {format_size(size)} is more than the {size_text(here.most)} that the host pool can have here "
            f"({here.why}); choose at most {here.most >> 20}MiB, or free memory"
        )


def uncached_bytes(files: Iterable[Path]) -> int:
    """Bytes of files that reading them will add to the page cache. The kernel tells it of files that this process may
    write to; others count in full."""
    libc, missing = ctypes.CDLL(None), 0
    for file in files:
        try:
            if not os.access(file, os.W_OK):
                missing += file.stat().st_size
                continue
            with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                content = np.frombuffer(mapped, np.uint8)
                pages = np.ones(-(-len(content) // mmap.PAGESIZE), np.uint8)
                start, cached = (ctypes.c_void_p(array.ctypes.data) for array in (content, pages))
                libc.mincore(start, ctypes.c_size_t(len(content)), cached)
                del content  # or the map cannot be closed
        except (OSError, ValueError):  # gone, or empty
            continue
        missing += mmap.PAGESIZE * int(np.count_nonzero(pages & 1 == 0))
    return missing


def numbers(text: str) -> list[int]:
    """The kernel's lists: "0-2,7" is 0, 1, 2, 7."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_cache(folder: Path) -> int:
    """File cache that counts as used, but which the kernel gives up first. Version 1 tells a group's own bytes and,
    with "total", those of the groups below too, which its usage counts."""
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    found = dict(re.findall(r"^(total_inactive_file|inactive_file) (\d+)", text, re.MULTILINE))
    return int(found.get("total_inactive_file") or found.get("inactive_file") or 0)


def size_text(size: int) -> str:
    """Bytes, for messages."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
