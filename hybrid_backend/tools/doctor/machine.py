"""Checks of the machine: the native kernels, cores, NUMA, memory."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from hybrid_backend.config import format_size
from hybrid_backend.engines.cpu_defaults import compiler_lacks
from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.host_memory import System, check_pool, room, size_text
from hybrid_backend.kernels.cpu.variants import DTYPES, VARIABLE, Choice, CpuModel, microarchitecture
from hybrid_backend.memory_plan.numa import KVCACHE_SPACE, rank_nodes
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.doctor.finding import Finding, unknown
from hybrid_backend.workers.cpus import cpu_quota

FEW_CORES = 4
LEAST_RAM = 4 * 2**30
"""General figure for the engine's processes and a small model."""
LEAST_SHM = 2**30
"""Docker's default is 64 MiB, which is too little for engines with several processes."""
_CPU_FLAGS = {
    "amx": {"amx_tile", "amx_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon": {"asimd"},
}
"""Flags of /proc/cpuinfo by the native library's instruction sets (kernels/cpu/build.py)."""


def check_kernels(
    isas: Callable[[], Sequence[str]], kernel: str = "auto", cpuinfo: Path = Path("/proc/cpuinfo")
) -> list[Finding]:
    """Check the native kernels and their instruction sets.

    Args:
        isas: returns the instruction sets of the library that this machine runs, best first.
        kernel: ``workers.kernel``.
        cpuinfo: the kernel's file.
    """
    try:
        built = list(isas())
    except WorkerError as error:
        text = f"{' '.join(str(error).split())}; attention runs in torch, several times slower"
        fix = "install a C++ compiler (Debian, Ubuntu: apt-get install build-essential), then hybrid-backend again"
        return [Finding("native kernels", "problem" if kernel == "native" else "warning", text, fix)]
    return [Finding("native kernels", "ok", "loaded"), _check_instruction_sets(built, cpuinfo)]


def _check_instruction_sets(built: Sequence[str], cpuinfo: Path) -> Finding:
    try:
        lines = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
        flags = set(lines[1].split() if lines else ())
    except OSError as error:
        return unknown("instruction sets", error, f"nothing to do: {built[0]} is used")
    missing = [name for name, needed in _CPU_FLAGS.items() if needed <= flags and name not in built]
    text = f"{', '.join(built)} (best first)"
    if missing:
        fix = "build with gcc 12 or clang 15 or later; if they stay away, the kernel or hypervisor does not allow them"
        return Finding("instruction sets", "warning", f"{text}; the CPU has {', '.join(missing)} too", fix)
    if built[0] == "generic":
        fix = "use a CPU with AVX2 (x86-64-v3) or more, or with NEON (AArch64)"
        return Finding("instruction sets", "warning", f"{text}: many times slower than AVX2", fix)
    return Finding("instruction sets", "ok", text)


def check_kernel_choice(choices: Callable[[], Sequence[Choice]], cpu: CpuModel) -> list[Finding]:
    """Name the kernels of each operation by dtype, those of most shapes first, and the reason for them.

    Args:
        choices: returns the choices of this process (`kernels.cpu.library.kernel_choices`).
        cpu: this machine's model.
    """
    try:
        chosen = sorted(choices(), key=attrgetter("case.operation"))
    except ConfigError as error:
        return [Finding("kernel choice", "problem", str(error), f"correct {VARIABLE}, or unset it")]
    except WorkerError:
        return []  # The check of the native kernels reports a missing library.
    reasons = {
        "known": f"known to be the fastest on {microarchitecture(cpu)}",
        "measured": "measured to be the fastest on this CPU",
        "forced": f"forced by {VARIABLE}",
        "only": "no other one runs here",
    }
    findings = []
    for operation, group in groupby(chosen, key=attrgetter("case.operation")):
        members = list(group)
        dtypes_of: dict[str, list[str]] = {}
        for dtype in DTYPES:
            best = [choice.order[0] for choice in members if choice.case.dtype == dtype]
            names = ", ".join(sorted(set(best), key=lambda name: -best.count(name)))
            dtypes_of.setdefault(names, []).append(dtype)
        kernels = [f"{', '.join(dtypes)}: {names}" for names, dtypes in dtypes_of.items() if names]
        why = [text for reason, text in reasons.items() if any(choice.reason == reason for choice in members)]
        findings.append(Finding(f"{operation} kernels", "ok", f"{'; '.join(kernels)} ({', or '.join(why)})"))
    return findings


def check_compiling(lacks: Callable[[], str | None] = compiler_lacks) -> Finding:
    """Check what torch.compile lacks."""
    if (lacking := lacks()) is None:
        return Finding("compiling", "ok", "a C++ compiler and Python's headers")
    text = f"vLLM cannot compile a model for this CPU without {lacking}"
    return Finding("compiling", "warning", text, "install it: decoding is about a third faster then")


def check_cores(cpus: int, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Check the CPUs that this process may run on, and the container's quota."""
    text, usable = counted(cpus, "CPU"), float(cpus)
    quota = cpu_quota(System(proc, cgroup))
    if quota is not None and quota < cpus:
        usable, text = quota, f"{quota:g} of {cpus} CPUs (the container's quota)"
    if usable < FEW_CORES:
        fix = f"give it {FEW_CORES} cores or more: CPU attention scales with them until memory is the limit"
        return Finding("cores", "warning", text, fix)
    return Finding("cores", "ok", text)


def check_numa(
    node: int | str = "auto", nodes: Path = Path("/sys/devices/system/node"), library: str = "libnuma.so.1"
) -> list[Finding]:
    """Check the NUMA library, and the nodes against ``workers.numa``."""
    try:
        ctypes.CDLL(library)
        finding = Finding("NUMA library", "ok", library)
    except OSError:
        text = f"{library} is missing, which vLLM's CPU engine loads"
        fix = "install it (Debian, Ubuntu: apt-get install libnuma1)"
        finding = Finding("NUMA library", "problem", text, fix)
    return [finding, _check_nodes(node, nodes)]


def _check_nodes(node: int | str, folder: Path) -> Finding:
    nodes = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*"))
    if not nodes:
        return unknown("NUMA nodes", f"no nodes in {folder}", "leave workers.numa at auto")
    text = f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
    if isinstance(node, int) and node not in nodes:
        return Finding("NUMA nodes", "problem", f"workers.numa: {node}, but there is {text}", "write auto")
    if len(nodes) > 1 and node == "auto":
        fix = f"set workers.numa: {nodes[0]} and start with `numactl --cpunodebind={nodes[0]} --membind={nodes[0]}`"
        return Finding("NUMA nodes", "warning", f"{text}: a pool on the other node reads slower", fix)
    return Finding("NUMA nodes", "ok", text)


def check_ram(pool_bytes: int | None, on_one_node: bool = False, system: System | None = None) -> Finding:
    """Check the host pool against the memory, by the rule of the engines' start. The model's weights are not known.

    Args:
        pool_bytes: ``host_pool.size``; None for auto, which is half of what the weights leave.
        on_one_node: the engine is vLLM's for the CPU, which takes memory from one NUMA node, and reads a variable.
        system: replaces /proc and /sys.
    """
    system, key, space = system or System(), "host_pool.size", os.environ.get(KVCACHE_SPACE, "")
    if on_one_node and pool_bytes is None and space.isdigit():
        pool_bytes, key = int(space) << 30, KVCACHE_SPACE
    try:
        nodes = rank_nodes(1, os.environ, os.sched_getaffinity(0), system) if on_one_node else [None]
        memory = room(system, nodes, uncached=None if nodes[0] is None else 0)
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


def check_memlock(pool_bytes: int | None, limit: int | None = None) -> Finding:
    """Check `ulimit -l` against the host pool, which is pinned on a machine with a GPU.

    Args:
        pool_bytes: size of the pool; None for auto.
        limit: bytes; None reads the limit of this process.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return Finding("pinned memory", "ok", "limit unlimited")
    if pool_bytes is not None and limit >= pool_bytes:
        return Finding("pinned memory", "ok", f"limit {size_text(limit)}")
    fix = "docker run --ulimit memlock=-1; elsewhere `ulimit -l unlimited` or LimitMEMLOCK=infinity in the service"
    pool = "the host pool" if pool_bytes is None else f"the host pool of {format_size(pool_bytes)}"
    return Finding("pinned memory", "warning", f"limit {size_text(limit)} is less than {pool}, which is pinned", fix)


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
