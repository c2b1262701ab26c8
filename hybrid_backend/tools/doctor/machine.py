"""Checks of the machine: cores, NUMA, the native kernels and their instruction sets, the GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_backend.errors import WorkerError
from hybrid_backend.host_memory import System
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.doctor.finding import Finding, State, unknown
from hybrid_backend.workers.cpus import cpu_quota

FEW_CORES = 4
# What /proc/cpuinfo calls the instruction sets of the native library (kernels/cpu/build.py).
_FLAGS = {
    "amx": {"amx_tile", "amx_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "fma", "f16c"},
}
_COMPILERS = ("c++", "g++", "clang++")
# Oldest Linux driver of a CUDA release (CUDA Toolkit release notes, "minor version compatibility").
_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def check_cores(cpus: int, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """``cpus``: that this process may run on (`os.sched_getaffinity`); a quota of the container counts."""
    found, usable = counted(cpus, "CPU"), float(cpus)
    quota = cpu_quota(System(proc, cgroup))
    if quota is not None and quota < cpus:
        usable, found = quota, f"{quota:g} of {cpus} CPUs (the container's quota)"
    if usable < FEW_CORES:
        fix = f"give it {FEW_CORES} cores or more: CPU attention scales with them until memory is the limit"
        return Finding("cores", "warning", found, fix)
    return Finding("cores", "ok", found)


def check_compiling(lacking: str | None) -> Finding:
    """``lacking``: what torch.compile lacks (`engines.cpu_defaults.compiler_lacks`)."""
    if lacking is None:
        return Finding("compiling", "ok", "a C++ compiler and Python's headers")
    found = f"vLLM cannot compile a model for this CPU without {lacking}"
    return Finding("compiling", "warning", found, "install it: decoding is about a third faster then")


def check_numa(
    node: int | str = "auto",
    nodes: Path = Path("/sys/devices/system/node"),
    library: str = "libnuma.so.1",
) -> list[Finding]:
    """``node``: ``workers.numa``."""
    findings = []
    try:
        ctypes.CDLL(library)
        findings.append(Finding("NUMA library", "ok", library))
    except OSError:
        fix = "install it (Debian, Ubuntu: apt-get install libnuma1)"
        findings.append(Finding("NUMA library", "problem", f"{library} is missing, which vLLM's CPU engine loads", fix))
    there = sorted(int(path.name[4:]) for path in nodes.glob("node[0-9]*"))
    if not there:
        found = unknown("NUMA nodes", f"no nodes in {nodes}", "leave workers.numa at auto")
    elif isinstance(node, int) and node not in there:
        found = Finding("NUMA nodes", "problem", f"workers.numa: {node}, but there is {_listed(there)}", "write auto")
    elif len(there) > 1 and node == "auto":
        fix = f"set workers.numa: {there[0]} and start with `numactl --cpunodebind={there[0]} --membind={there[0]}`"
        found = Finding("NUMA nodes", "warning", f"{_listed(there)}: a pool on the other node reads slower", fix)
    else:
        found = Finding("NUMA nodes", "ok", _listed(there))
    return [*findings, found]


def _listed(nodes: Sequence[int]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"


def check_kernels(
    isas: Callable[[], Sequence[str]],
    wanted: str = "auto",
    cpuinfo: Path = Path("/proc/cpuinfo"),
    compilers: Sequence[str] = _COMPILERS,
) -> list[Finding]:
    """The native kernels, and a compiler if they are missing.

    Args:
        isas: the instruction sets that the native library has and this machine runs, best first
            (`kernels.cpu.library.isas`).
        wanted: ``workers.kernel``.
    """
    try:
        built = list(isas())
    except WorkerError as error:
        state: State = "problem" if wanted == "native" else "warning"
        compiler = next((path for path in map(shutil.which, compilers) if path), None)
        fix = (
            f"install hybrid-backend again; {compiler} is there to build them"
            if compiler
            else "install a C++ compiler (Debian, Ubuntu: apt-get install build-essential), then hybrid-backend again"
        )
        found = f"{' '.join(str(error).split())}; attention runs in torch, several times slower"
        return [Finding("native kernels", state, found, fix)]
    findings = [Finding("native kernels", "ok", "loaded")]
    try:
        flags = set(re.findall(r"\w+", cpuinfo.read_text().partition("\nflags")[2].partition("\n")[0]))
    except OSError as error:
        return [*findings, unknown("instruction sets", error, f"nothing to do: {built[0]} is used")]
    missing = [name for name, needed in _FLAGS.items() if needed <= flags and name not in built]
    found = f"{', '.join(built)} (best first)"
    if built[0] == "generic" and not missing:
        fix = "use a CPU with AVX2 (x86-64-v3) or more"
        return [*findings, Finding("instruction sets", "warning", f"{found}: many times slower than AVX2", fix)]
    if missing:
        fix = "build with gcc 12 or clang 15 or later; if they stay away, the kernel or hypervisor does not allow them"
        found += f"; the CPU has {', '.join(missing)} too"
        return [*findings, Finding("instruction sets", "warning", found, fix)]
    return [*findings, Finding("instruction sets", "ok", found)]


@dataclass(frozen=True)
class TorchBuild:
    """What `torch` says of itself. ``cuda``: its CUDA release, None for a CPU build; ``sees_gpu``: it can use one."""

    version: str
    cuda: str | None
    sees_gpu: bool
    gpus: tuple[str, ...] = ()  # name and memory of each


def check_gpu(
    torch_build: TorchBuild | None,
    proc: Path = Path("/proc"),
    pci: Path = Path("/sys/bus/pci/devices"),
) -> Finding:
    """The GPU, its driver, and whether torch can use it."""
    driver = _driver(proc)
    cards = _nvidia_cards(pci)
    if torch_build is not None and torch_build.sees_gpu:
        return Finding("GPU", "ok", f"{'; '.join(torch_build.gpus)}; driver {driver or 'unknown'}")
    if driver is None:
        if cards:
            fix = "install NVIDIA's driver; in a container: NVIDIA Container Toolkit and --gpus all"
            return Finding("GPU", "warning", f"{cards} NVIDIA device(s) without a driver: the CPU serves", fix)
        return Finding("GPU", "ok", "none: the device tier is the CPU")
    if torch_build is None or torch_build.cuda is None:
        fix = "to serve on the GPU, install vllm and torch's CUDA builds in an environment of their own"
        return Finding("GPU", "warning", f"driver {driver}, but torch is a CPU build: the CPU serves", fix)
    oldest = _DRIVERS.get(int(torch_build.cuda.partition(".")[0]))
    if oldest is not None and tuple(int(x) for x in driver.split(".")[:2]) < oldest:
        needed = ".".join(map(str, oldest))
        found = f"driver {driver} is too old for torch's CUDA {torch_build.cuda}"
        return Finding("GPU", "problem", found, f"install driver {needed} or later, or torch for an older CUDA")
    fix = "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES; in a container: --gpus all"
    return Finding("GPU", "problem", f"driver {driver}, CUDA build of torch, but torch sees no GPU", fix)


def _driver(proc: Path) -> str | None:
    """Version of NVIDIA's kernel module."""
    try:
        match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", (proc / "driver/nvidia/version").read_text())
    except OSError:
        return None
    return match[1] if match else None


def _nvidia_cards(pci: Path) -> int:
    """Display and 3D controllers of NVIDIA (vendor 10de, class 03)."""
    count = 0
    for device in pci.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == "0x10de" and kind.startswith("0x03")
    return count


def allowed_cpus() -> int:
    return len(os.sched_getaffinity(0))
