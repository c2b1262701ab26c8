"""Memory that the host pool may take: limits of the machine, of its NUMA nodes and of the container.

The engines size and check the host pool with this module before they load anything; `hybrid doctor` prints the limits.
The module imports neither an engine nor torch.
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
"""Host memory of a rank besides weights and host pool until the pool is allocated, in bytes.

Includes the rank's processes, compiled code and activations. Measured: 1.1 GiB for vLLM with SmolLM2-135M, without
compilation."""
_NO_LIMIT = 2**60
"""Limits from this number of bytes on mean "no limit": control groups of version 1 write a number near 2^63."""


@dataclass(frozen=True)
class Node:
    """A NUMA node.

    ``free`` is counted as in vLLM 0.32 (``get_memory_node_info`` in vllm/utils/cpu_resource_utils.py).
    """

    total: int  # memory of the node in bytes
    free: int  # bytes that can be allocated, file cache included
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class System:
    """Folders in which the Linux kernel reports memory, and methods that read the files in these folders."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    sys_nodes: Path = Path("/sys/devices/system/node")

    def meminfo(self, key: str) -> int:
        """Return the bytes under ``key`` in /proc/meminfo. Raises ConfigError if the file or the key is missing."""
        file = self.proc / "meminfo"
        try:
            match = re.search(rf"^{key}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror}); run where /proc is mounted") from None
        if match is None:
            raise ConfigError(f"{file} has no {key}; the kernel does not tell the memory; run on Linux 3.14 or later")
        return int(match[1]) * 1024

    def available(self) -> int:
        """Return the bytes that this process can still allocate, on all NUMA nodes together."""
        cgroup_bytes = self.cgroup_left()
        available = self.meminfo("MemAvailable")
        return available if cgroup_bytes is None else min(available, cgroup_bytes)

    def cgroup_left(self) -> int | None:
        """Return the bytes that this process's control group and its parents may still allocate; None without a limit.

        File cache counts as free, because the kernel drops file cache under pressure.
        """
        free_bytes = []
        for folder, limit_file, usage_file in self._groups():
            limit = _number(folder / limit_file)
            if limit is not None and limit < _NO_LIMIT:
                free_bytes.append(max(0, limit - (_number(folder / usage_file) or 0) + _file_cache(folder)))
        return min(free_bytes, default=None)

    def _groups(self) -> Iterator[tuple[Path, str, str]]:
        """Yield ``(folder, limit file, usage file)`` of this process's control groups: version 2, then version 1."""
        for controller, limit_file, usage_file in (
            ("", "memory.max", "memory.current"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            for folder in self.groups(controller):
                yield folder, limit_file, usage_file

    def groups(self, controller: str) -> Iterator[Path]:
        """Yield the folders of this process's control group and of all its parent groups.

        Args:
            controller: name of a controller of version 1; "" for version 2.
        """
        try:
            lines = [line.split(":", 2) for line in (self.proc / "self/cgroup").read_text().splitlines()]
        except OSError:
            lines = []
        own_paths = [line[2].lstrip("/") for line in lines if len(line) == 3 and controller in line[1].split(",")]
        # A container may see its group's path on the host, which does not exist in the container. The root group is
        # then the container's own.
        paths = [Path(path) for path in (*own_paths, "")]
        yield from dict.fromkeys(self.cgroup / controller / above for path in paths for above in (path, *path.parents))

    def container(self) -> tuple[int, int] | None:
        """Return ``(limit, usage)`` of the root control group in bytes; None without limit.

        File cache counts as used, as in vLLM 0.32.
        """
        for folder, limit_file, usage_file in (
            (self.cgroup, "memory.max", "memory.current"),
            (self.cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_file)
            if limit is not None:
                return (limit, _number(folder / usage_file) or 0) if limit < _NO_LIMIT else None
        return None

    def nodes(self) -> dict[int, Node]:
        """Return the NUMA nodes by number; empty if the kernel reports no nodes."""
        nodes: dict[int, Node] = {}
        for folder in sorted(self.sys_nodes.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
            try:
                lines = re.findall(r"^Node \d+ (\S+):\s+(\d+)", (folder / "meminfo").read_text(), re.MULTILINE)
                cpus = tuple(numbers((folder / "cpulist").read_text()))
            except OSError:
                continue
            sizes = {name: int(kib) * 1024 for name, kib in lines}
            free = sum(sizes.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
            nodes[int(folder.name[4:])] = Node(sizes.get("MemTotal", 0), free, cpus)
        return nodes

    def allowed_nodes(self) -> list[int]:
        """Return the NUMA nodes that this process may allocate memory on; empty if the kernel does not report them."""
        try:
            match = re.search(r"^Mems_allowed_list:\s*(\S+)", (self.proc / "self/status").read_text(), re.MULTILINE)
        except OSError:
            return []
        return numbers(match[1]) if match else []


@dataclass(frozen=True)
class Place:
    """A memory that one or more ranks allocate from."""

    name: str  # description of the memory for messages
    free: int  # bytes that can be allocated
    ranks: int  # number of ranks whose weights are loaded into this memory
    pools: int  # number of host pools that are allocated in this memory


@dataclass(frozen=True)
class Room:
    """Limits of one rank's host pool."""

    most: int  # largest size of the host pool in bytes
    auto: int  # size of the host pool in bytes if the user chooses none
    place: Place  # memory that limits the host pool most
    weights: int  # bytes of weights that each rank has yet to load

    @property
    def why(self) -> str:
        """Explanation of the limit for error messages."""
        reserved = f"{size_text(RESERVE)} for the engine"
        if self.weights:
            reserved = f"{size_text(self.weights)} of weights and {reserved}"
        suffix = f" for each of {self.place.ranks} ranks" if self.place.ranks > 1 else ""
        return f"{size_text(self.place.free)} {self.place.name}, less {reserved}{suffix}"


def room(
    system: System, nodes: Sequence[int | None], weights: int = 0, uncached: int | None = None, reserve: int = RESERVE
) -> Room:
    """Return how large the host pool of each rank may be.

    Args:
        system: folders in which the kernel reports memory.
        nodes: per rank of this machine the NUMA node that its memory is allocated on, None for any node.
        weights: bytes that each rank has yet to load into host memory.
        uncached: bytes of weight files that are not in the page cache. vLLM's CPU engine passes this value, because
            its own check counts file cache as used if a container's limit is below its node's memory. None: no check.
        reserve: bytes that each rank takes besides weights and host pool.

    Returns:
        ``most``, never negative, and ``auto``: half of what the weights leave, at most ``most``.
    """
    places = list(_places(system, nodes, uncached))

    def pool_bytes(place: Place, reserve: int) -> int:
        return max(0, (place.free - place.ranks * (weights + reserve)) // place.pools)

    tightest = min(places, key=lambda place: pool_bytes(place, reserve))
    most = pool_bytes(tightest, reserve)
    return Room(most, min(most, *(pool_bytes(place, 0) // 2 for place in places)), tightest, weights)


def _places(system: System, nodes: Sequence[int | None], uncached: int | None) -> Iterator[Place]:
    """Yield each memory that limits the host pools of the ranks (arguments: `room`)."""
    ranks, machine_nodes = len(nodes), system.nodes()
    yield Place("available on this machine", system.meminfo("MemAvailable"), ranks, ranks)
    left = system.cgroup_left()
    if left is not None:
        yield Place("left under the container's limit", left, ranks, ranks)
    allowed = [node for node in system.allowed_nodes() if node in machine_nodes]
    if allowed and len(allowed) < len(machine_nodes):
        free = sum(machine_nodes[node].free for node in allowed)
        yield Place(f"on the NUMA nodes that it may use ({', '.join(map(str, allowed))})", free, ranks, ranks)
    for node, count in Counter(node for node in nodes if node is not None).items():
        # For a node that the kernel does not report, the engine uses the memory of the whole machine.
        if node not in machine_nodes:
            continue
        yield Place(f"available on NUMA node {node}", machine_nodes[node].free, count, count)
        container = system.container()
        if uncached is not None and container is not None and container[0] < machine_nodes[node].total:
            # Each rank checks this limit before any rank allocates its host pool, hence one host pool.
            left = max(0, container[0] - container[1] - uncached)
            yield Place("left under the container's limit with file cache counted as used", left, ranks, 1)


def check_pool(key: str, size: int, limits: Room) -> None:
    """Raise ConfigError if a host pool of ``size`` bytes per rank exceeds ``limits``. ``key`` is the setting's name."""
    if size > limits.most:
        raise ConfigError(
            f"{key}: {format_size(size)} is more than the {size_text(limits.most)} that the host pool can have here "
            f"({limits.why}); choose at most {limits.most >> 20}MiB, or free memory"
        )


def check_available(key: str, size: int, system: System | None = None) -> None:
    """Raise ConfigError if a host pool of ``size`` bytes is larger than all the memory that is available.

    The check needs no engine, so that `hybrid serve` makes it before the imports; `check_pool` knows the exact limit.
    """
    available = (system or System()).available()
    if size > available:
        raise ConfigError(
            f"{key}: {format_size(size)} is more than the {size_text(available)} that are available here; choose less, "
            "or free memory"
        )


def uncached_bytes(files: Iterable[Path]) -> int:
    """Return how many bytes of files are not in the page cache.

    The kernel reports the cached pages of a file only to processes that may write to the file. All bytes of other files
    count as uncached.
    """
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
                del content  # A map with an array over it cannot be closed.
        except (OSError, ValueError):  # The file was removed or is empty.
            continue
        missing += mmap.PAGESIZE * int(np.count_nonzero(pages & 1 == 0))
    return missing


def numbers(text: str) -> list[int]:
    """Parse a list of numbers in the kernel's format: "0-2,7" is 0, 1, 2, 7."""
    values: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        values.update(range(int(first), int(last or first) + 1))
    return sorted(values)


def _number(file: Path) -> int | None:
    """Return the number in a file; None if the file is missing or holds another text, such as "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_cache(folder: Path) -> int:
    """Return the bytes of inactive file cache in a control group: counted as used, but dropped by the kernel on demand.

    In version 1 the keys with "total" include the groups below, as the usage does.
    """
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    stat = dict(re.findall(r"^(total_inactive_file|inactive_file) (\d+)", text, re.MULTILINE))
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)


def size_text(size: int) -> str:
    """Format a number of bytes for messages, in GiB or MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
