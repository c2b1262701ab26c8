"""Choice of the CPUs for the workers: one CPU per physical core that no rank of the engine computes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import System, numbers

_SPIN_SECONDS = 1e-3
"""Polling time of an idle worker before it sleeps. A layer on a GPU and most gaps between two steps take less."""
_ENGINE_CPUS, _RANK_CPUS = 2, 1
"""CPUs that a GPU engine keeps busy: one for the API server, which serves HTTP and turns tokens into text, and one for
the engine core, which schedules; and one per rank, whose thread launches the steps."""
_WORKERS_SHARE = 0.75
"""Least share of a rank's CPUs that the pool takes, where the engine's processes would need more than the rest."""

THREAD_NAME = "hybrid-worker"
"""Name of worker threads in /proc. The C++ threads get the same name (``pin_to`` in kernels/cpu/src/pool.cpp)."""


@dataclass(frozen=True)
class Rank:
    """This process among the engine's ranks on this machine."""

    index: int = 0  # index of the rank, from 0
    count: int = 1  # number of ranks
    on_gpu: bool = False  # the engine computes on GPUs
    node: int | None = None  # NUMA node of the rank's GPU; None: unknown, or no GPU

    def with_gpus(self, nodes: Sequence[int | None]) -> Rank:
        """Return this rank among the ranks whose GPUs share its NUMA node. ``nodes``: the node of each rank's GPU."""
        node = nodes[self.index]
        return Rank(nodes[: self.index].count(node), nodes.count(node), on_gpu=True, node=node)


ALONE = Rank()


@dataclass(frozen=True)
class Topology:
    """CPUs of the machine by physical core and by NUMA node."""

    cores: tuple[frozenset[int], ...]  # CPUs (hardware threads) of each physical core
    nodes: dict[int, frozenset[int]]  # CPUs of each NUMA node by its number; empty if the kernel reports no nodes

    @classmethod
    def read(cls, system: Path = Path("/sys/devices/system")) -> Topology:
        """Read the topology of this machine."""
        cores = {_cpu_list(path) for path in system.glob("cpu/cpu[0-9]*/topology/thread_siblings_list")}
        nodes = {int(path.parent.name[4:]): _cpu_list(path) for path in system.glob("node/node[0-9]*/cpulist")}
        return cls(tuple(sorted(cores, key=min)), nodes)

    def one_per_core(self, cpus: Iterable[int]) -> list[int]:
        """Return the lowest of ``cpus`` on each core. A CPU that belongs to no known core counts as a core."""
        candidates = set(cpus)
        shares = [core & candidates for core in self.cores]
        return sorted([min(share) for share in shares if share] + list(candidates.difference(*self.cores)))

    def siblings(self, cpus: Iterable[int]) -> frozenset[int]:
        """Return ``cpus`` and all CPUs that share a physical core with one of them."""
        cpu_set = frozenset(cpus)
        return cpu_set.union(*(core for core in self.cores if core & cpu_set))


@dataclass(frozen=True)
class Bound:
    """CPUs that the engine's threads are bound to, by their affinity masks.

    All ranks order the engine's processes by process id, so that the ranks divide CPUs alike.
    """

    allowed: frozenset[int]  # CPUs that the engine may use
    pinned: frozenset[int] = frozenset()  # CPUs that threads of this process are pinned to; empty: no thread is pinned
    before: tuple[frozenset[int], ...] = ()  # `pinned`, if not empty, of the engine's processes with smaller ids
    after: tuple[frozenset[int], ...] = ()  # `pinned`, if not empty, of the engine's processes with larger ids

    @classmethod
    def read(cls, proc: Path = Path("/proc")) -> Bound:
        """Read the affinity masks of this process and of its process group, which holds the engine's processes."""
        own_pid, parent, allowed = os.getpid(), os.getppid(), frozenset(os.sched_getaffinity(0))
        # The engine's parent process may have pinned the calling thread, so the parent's CPUs are allowed as well.
        if _is_engine(proc, parent):
            allowed |= _affinity(parent)
        pinned: dict[int, frozenset[int]] = {}
        for pid in sorted(int(path.name) for path in proc.glob("[0-9]*")):
            try:
                if os.getpgid(pid) == os.getpgid(own_pid):
                    pinned[pid] = _pinned(proc / str(pid) / "task", allowed)
            except OSError:
                continue  # The process has ended.
        own = pinned.pop(own_pid, frozenset())
        return cls(
            allowed,
            own,
            tuple(cpus for pid, cpus in pinned.items() if cpus and pid < own_pid),
            tuple(cpus for pid, cpus in pinned.items() if cpus and pid > own_pid),
        )


@dataclass(frozen=True)
class Places:
    """CPUs that the threads of a `NativePool` are pinned to."""

    workers: tuple[int, ...]  # CPUs of the worker threads
    server: int | None = None  # CPU of the thread that polls a GPU's mailboxes and also computes; None: no GPU
    spin_seconds: float = 0.0  # how long an idle thread polls for work before it sleeps

    @classmethod
    def of(cls, cpus: Sequence[int], bound: Bound, topology: Topology, rank: Rank, chosen: bool = False) -> Places:
        """Assign ``cpus`` to the threads of a pool.

        With a GPU, the last CPU is the server's, and the first ones stay free for the engine's own processes and for
        interrupts (`engine_cpus`); not if the user has ``chosen`` the CPUs. Threads spin only if the engine has a core
        that no worker uses, because spinning threads would otherwise slow the engine down.
        """
        if not rank.on_gpu:
            return cls(tuple(cpus))
        used = cpus if chosen else cpus[engine_cpus(len(cpus), rank) :]
        free_cores = topology.one_per_core(bound.allowed - topology.siblings(used))
        return cls(tuple(used[:-1] or used), used[-1], _SPIN_SECONDS if free_cores else 0.0)


def engine_cpus(cpus: int, rank: Rank) -> int:
    """Return how many of a GPU rank's ``cpus`` stay free for the engine's own processes.

    The rank's own thread gets one CPU. The ranks of a NUMA node share the CPUs of API server and engine core, because a
    rank does not know on which node these two run.
    """
    needed = _RANK_CPUS + -(-_ENGINE_CPUS // rank.count)
    return min(needed, int(cpus * (1 - _WORKERS_SHARE)))


def spare_cpus(bound: Bound, topology: Topology, numa: int | str = "auto", rank: Rank = ALONE) -> list[int]:
    """Return the CPUs for the workers of one rank: one CPU of each physical core without pinned threads of the engine.

    Ranks that choose from the same cores share the cores equally. If the engine's threads are pinned to all cores,
    the workers get the idle siblings of this rank's pinned CPUs, or else the pinned CPUs themselves.

    Args:
        bound: CPUs that the engine's threads are bound to.
        topology: cores and NUMA nodes of the machine.
        numa: ``workers.numa``: number of a NUMA node, or "auto" for the node of the rank's GPU or pinned threads.
        rank: this process among the engine's ranks.

    Returns:
        CPU numbers, ascending, at least one.

    Raises:
        ConfigError: the machine has no node ``numa``, or the process may use none of the node's CPUs.
    """
    candidates = _candidates(bound, topology, numa, rank)
    # A GPU engine binds threads to a whole node, but computes nothing on the CPUs of that node.
    pinned = [] if rank.on_gpu else [*bound.before, bound.pinned, *bound.after]
    if pinned and bound.pinned:
        before, after = (sum(bool(cpus & candidates) for cpus in side) for side in (bound.before, bound.after))
        rank = Rank(before, before + 1 + after)
    engine_cpus = frozenset().union(*pinned)
    spare = _share(topology.one_per_core(candidates - topology.siblings(engine_cpus)), rank)
    if spare:
        return spare
    if pinned and bound.pinned:
        idle = topology.siblings(bound.pinned) & candidates - engine_cpus
        return topology.one_per_core(idle) or topology.one_per_core(bound.pinned & candidates or candidates)
    cores = topology.one_per_core(candidates)
    return _share(cores, rank) or [cores[rank.index % len(cores)]]


def _candidates(bound: Bound, topology: Topology, numa: int | str, rank: Rank) -> frozenset[int]:
    """Return the CPUs that the process may use on the NUMA node that `spare_cpus` chooses from."""
    if isinstance(numa, int):
        if numa not in topology.nodes:
            raise ConfigError(f"workers.numa: this machine has no NUMA node {numa}; write auto or another node")
        if cpus := bound.allowed & topology.nodes[numa]:
            return cpus
        raise ConfigError(f"workers.numa: this process may use no CPU of node {numa}; write auto or another node")
    if rank.on_gpu:
        return bound.allowed & topology.nodes.get(-1 if rank.node is None else rank.node, frozenset()) or bound.allowed
    if bound.pinned:
        nodes = [node for node in topology.nodes.values() if node & bound.pinned]
        return bound.allowed & frozenset().union(*nodes) or bound.allowed
    return bound.allowed


def cpu_quota(system: System | None = None) -> float | None:
    """Return how many CPUs this process may use on average under its control group's quota; None without a quota."""
    system = system or System()
    quotas = [_quota(folder) for controller in ("", "cpu") for folder in system.groups(controller)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """Return the CPU quota of one control group (version 2 or 1); None without a quota."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return int(quota) / int(period) if quota.isdigit() and int(period) else None


def within_quota(cpus: list[int], quota: float | None, ranks: int) -> list[int]:
    """Return as many of ``cpus`` as each rank may use at once, because the kernel throttles a group above its quota."""
    return cpus if quota is None else cpus[: max(1, int(quota / ranks))]


def name_thread() -> None:
    """Mark the calling thread as a worker, so that `Bound.read` of no rank counts it among the engine's threads."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD_NAME)


def check_cpus(cpus: Sequence[int], allowed: frozenset[int]) -> list[int]:
    """Return ``workers.cpus`` as a list.

    Raises:
        ConfigError: the process may not use one of the CPUs.
    """
    wrong = sorted(set(cpus) - allowed)
    if wrong:
        raise ConfigError(
            f"workers.cpus: this process may not use {', '.join(map(str, wrong))}; it may use {_spans(allowed)}"
        )
    return list(cpus)


def _share(cpus: list[int], rank: Rank) -> list[int]:
    """Return the rank's share of ``cpus``: consecutive CPUs, because neighbouring cores share caches."""
    return cpus[len(cpus) * rank.index // rank.count : len(cpus) * (rank.index + 1) // rank.count]


def _is_engine(proc: Path, pid: int) -> bool:
    """Tell whether a process belongs to the engine: it runs the same program as this process, in its process group.

    A shell or a tool such as taskset, which may bind this process to CPUs, does not.
    """
    try:
        same_program = os.readlink(proc / str(pid) / "exe") == os.readlink(proc / "self/exe")
        return same_program and os.getpgid(pid) == os.getpgid(0)
    except OSError:
        return False


def _affinity(thread: int) -> frozenset[int]:
    """Return the CPUs that a thread may run on; empty if the thread has ended or belongs to another user."""
    try:
        return frozenset(os.sched_getaffinity(thread))
    except (PermissionError, ProcessLookupError):
        return frozenset()


def _pinned(tasks: Path, allowed: frozenset[int]) -> frozenset[int]:
    """Return the CPUs that the threads of one process are pinned to, worker threads excepted.

    Every thread counts, because an OpenMP runtime may pin each thread to a CPU, the main thread to the first.
    """
    pinned: frozenset[int] = frozenset()
    for task in tasks.glob("[0-9]*"):
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue
        cpus = _affinity(int(task.name)) & allowed
        if name != THREAD_NAME and cpus < allowed:
            pinned |= cpus
    return pinned


def _cpu_list(path: Path) -> frozenset[int]:
    """Read a list of CPUs from a file under /sys; the list of a NUMA node without CPUs is empty."""
    return frozenset(numbers(path.read_text()))


def _spans(cpus: Iterable[int]) -> str:
    """Format CPU numbers as the kernel does, for example 0-2,7."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
