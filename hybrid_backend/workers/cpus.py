"""Which CPUs the workers take: one per physical core that neither this rank nor another computes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import System, numbers

_SPIN_SECONDS = 1e-3  # a layer of a GPU's step takes less, and so does what lies between two steps as a rule
_ENOUGH = 4  # of so many cores one is left to the engine

THREAD_NAME = "hybrid-worker"  # kernels/cpu/src/pool.cpp, `pin_to`, gives its threads the same


@dataclass(frozen=True)
class Rank:
    """This process among the engine's ranks on this machine. ``on_gpu``: the engine computes on GPUs, of which this
    rank's hangs on NUMA node ``node`` (None: the machine does not say)."""

    index: int = 0
    count: int = 1
    on_gpu: bool = False
    node: int | None = None

    def with_gpus(self, nodes: Sequence[int | None]) -> Rank:
        """Among the ranks whose GPU hangs on the same NUMA node. ``nodes``: of every rank's GPU."""
        mine = nodes[self.index]
        return Rank(nodes[: self.index].count(mine), nodes.count(mine), on_gpu=True, node=mine)


ALONE = Rank()


@dataclass(frozen=True)
class Topology:
    """``cores``: the CPUs of each physical core. ``nodes``: the CPUs of each NUMA node; none where the kernel knows
    no nodes."""

    cores: tuple[frozenset[int], ...]
    nodes: dict[int, frozenset[int]]

    @classmethod
    def read(cls, system: Path = Path("/sys/devices/system")) -> Topology:
        cores = {_cpu_list(path) for path in system.glob("cpu/cpu[0-9]*/topology/thread_siblings_list")}
        nodes = {int(path.parent.name[4:]): _cpu_list(path) for path in system.glob("node/node[0-9]*/cpulist")}
        return cls(tuple(sorted(cores, key=min)), nodes)

    def one_per_core(self, cpus: Iterable[int]) -> list[int]:
        """The lowest of ``cpus`` on every core that has one; a CPU of which nothing is known is a core."""
        wanted = set(cpus)
        known: set[int] = set().union(*self.cores)
        shares = [core & wanted for core in self.cores]
        return sorted([min(share) for share in shares if share] + list(wanted - known))

    def siblings(self, cpus: Iterable[int]) -> frozenset[int]:
        """``cpus``, and all that share a core with one of them."""
        wanted = frozenset(cpus)
        return wanted.union(*(core for core in self.cores if core & wanted))


@dataclass(frozen=True)
class Bound:
    """Where the engine's threads may run. ``allowed``: the engine as a whole; ``mine``: CPUs that this process's own
    threads are pinned to, none if they are not; ``before``, ``after``: the same of the engine's other processes that
    pin theirs, in an order that all of them see alike, around this one's place in it."""

    allowed: frozenset[int]
    mine: frozenset[int] = frozenset()
    before: tuple[frozenset[int], ...] = ()
    after: tuple[frozenset[int], ...] = ()

    @classmethod
    def now(cls, proc: Path = Path("/proc")) -> Bound:
        """As the kernel has it: of this process and of all others in its process group, which are the engine's."""
        me, parent, allowed = os.getpid(), os.getppid(), frozenset(os.sched_getaffinity(0))
        if _is_engine(proc, parent):  # which may have pinned this very thread
            allowed |= _affinity(parent)
        found: dict[int, frozenset[int]] = {}
        for pid in sorted(int(path.name) for path in proc.glob("[0-9]*")):
            try:
                if os.getpgid(pid) == os.getpgid(me):
                    found[pid] = _pinned(proc / str(pid) / "task", allowed)
            except OSError:
                continue  # it ended meanwhile
        others = [(pid, cpus) for pid, cpus in found.items() if cpus and pid != me]
        return cls(
            allowed, found.get(me, frozenset()),
            tuple(cpus for pid, cpus in others if pid < me), tuple(cpus for pid, cpus in others if pid > me),
        )  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Where native workers run. ``server``: the CPU of the thread that watches a GPU's mailboxes and computes with the
    others; None: there is no GPU. ``spin_seconds``: how long threads without work look for some before they sleep."""

    workers: tuple[int, ...]
    server: int | None = None
    spin_seconds: float = 0.0

    @classmethod
    def of(cls, cpus: Sequence[int], bound: Bound, topology: Topology, rank: Rank, chosen: bool = False) -> Places:
        """Out of ``cpus``. With a GPU the last one is the server's, and unless the user has ``chosen`` them the first
        of four or more stays free: for the engine's own threads, which launch the step, and for interrupts.

        Threads spin where the engine has a core that is not theirs: else they would take its time.
        """
        if not rank.on_gpu:
            return cls(tuple(cpus))
        mine = cpus[1:] if len(cpus) >= _ENOUGH and not chosen else cpus
        left = topology.one_per_core(bound.allowed - topology.siblings(mine))
        return cls(tuple(mine[:-1] or mine), mine[-1], _SPIN_SECONDS if left else 0.0)


def spare_cpus(bound: Bound, topology: Topology, numa: int | str = "auto", rank: Rank = ALONE) -> list[int]:
    """CPUs for the workers of this rank, ascending, never none.

    One of every physical core that no thread of the engine is pinned to, on the right NUMA node: ``numa``, else
    that of the rank's GPU, else those of the rank's own pinned threads, else all. Ranks on the same cores share them
    out. Where no core is spare: the idle siblings of this rank's own cores, else these cores themselves, and where
    nothing is pinned what the node has.

    Args:
        numa: ``workers.numa``.

    Raises:
        ConfigError: no such node, or none of its CPUs may be used.
    """
    here = bound.allowed
    if isinstance(numa, int):
        if numa not in topology.nodes:
            raise ConfigError(f"workers.numa: this machine has no NUMA node {numa}; write auto or another node")
        here = here & topology.nodes[numa]
        if not here:
            raise ConfigError(f"workers.numa: this process may use no CPU of node {numa}; write auto or another node")
    elif rank.on_gpu:
        here = here & topology.nodes.get(-1 if rank.node is None else rank.node, frozenset()) or here
    elif bound.mine:
        mine = [node for node in topology.nodes.values() if node & bound.mine]
        here = here & frozenset().union(*mine) or here
    # Threads that a GPU engine binds to a whole node compute nothing.
    pinned = [] if rank.on_gpu else [*bound.before, bound.mine, *bound.after]
    taken = topology.siblings(frozenset().union(*pinned))
    if pinned and bound.mine:
        neighbours = [[cpus for cpus in side if cpus & here] for side in (bound.before, bound.after)]
        rank = Rank(len(neighbours[0]), len(neighbours[0]) + 1 + len(neighbours[1]))
    spare = _share(topology.one_per_core(here - taken), rank)
    if spare:
        return spare
    if pinned and bound.mine:
        idle = topology.siblings(bound.mine) & here - frozenset().union(*pinned)
        return topology.one_per_core(idle) or topology.one_per_core(bound.mine & here or here)
    cores = topology.one_per_core(here)
    return _share(cores, rank) or [cores[rank.index % len(cores)]]


def cpu_quota(system: System | None = None) -> float | None:
    """CPUs that this process's control group, and those above it, may use at a time; None without a quota."""
    system = system or System()
    found = [_quota(folder) for controller in ("", "cpu") for folder in system.groups(controller)]
    return min((quota for quota in found if quota is not None), default=None)


def _quota(group: Path) -> float | None:
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
    """As many as all ``ranks`` may use at once: more threads would only be stopped, the engine's with them."""
    return cpus if quota is None else cpus[: max(1, int(quota / ranks))]


def name_thread() -> None:
    """The calling thread is a worker: `Bound.now`, of other ranks too, does not take it for the engine's own."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD_NAME)


def check_cpus(cpus: Sequence[int], allowed: frozenset[int]) -> list[int]:
    """``workers.cpus`` as given.

    Raises:
        ConfigError: this process may not use one of them.
    """
    wrong = sorted(set(cpus) - allowed)
    if wrong:
        raise ConfigError(
            f"workers.cpus: this process may not use {', '.join(map(str, wrong))}; it may use {_spans(allowed)}"
        )
    return list(cpus)


def _share(cpus: list[int], rank: Rank) -> list[int]:
    """A run of neighbours: they share caches."""
    return cpus[len(cpus) * rank.index // rank.count : len(cpus) * (rank.index + 1) // rank.count]


def _is_engine(proc: Path, pid: int) -> bool:
    """Whether this process is one of another's of the engine, not a shell's or of a tool that has bound it to CPUs."""
    try:
        same_program = os.readlink(proc / str(pid) / "exe") == os.readlink(proc / "self/exe")
        return same_program and os.getpgid(pid) == os.getpgid(0)
    except OSError:
        return False


def _affinity(thread: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(thread))
    except (PermissionError, ProcessLookupError):
        return frozenset()


def _pinned(tasks: Path, allowed: frozenset[int]) -> frozenset[int]:
    """CPUs that a process's threads are pinned to, but for our workers. Every thread counts: an OpenMP runtime may pin
    each to a CPU of its own, and the main thread to the first."""
    found: frozenset[int] = frozenset()
    for task in tasks.glob("[0-9]*"):
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue
        cpus = _affinity(int(task.name)) & allowed
        if name != THREAD_NAME and cpus < allowed:
            found |= cpus
    return found


def _cpu_list(path: Path) -> frozenset[int]:
    """A node without CPUs has an empty line."""
    return frozenset(numbers(path.read_text()))


def _spans(cpus: Iterable[int]) -> str:
    """As `host_memory.numbers` reads it."""
    found: list[list[int]] = []
    for cpu in sorted(cpus):
        if found and found[-1][1] == cpu - 1:
            found[-1][1] = cpu
        else:
            found.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)
