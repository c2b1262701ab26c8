"""Checks of the machine: cores, NUMA, the native kernels and their instruction sets, the GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_backend.errors import WorkerError
from hybrid_backend.host_memory import System
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.doctor.finding import Finding, unknown
from hybrid_backend.workers.cpus import cpu_quota

FEW_CORES = 4
_CPU_FLAGS = {
    "amx": {"amx_tile", "amx_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "fma", "f16c"},
}
"""Flags of /proc/cpuinfo by the native library's instruction sets (kernels/cpu/build.py)."""
_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Oldest Linux driver of a CUDA release (CUDA Toolkit release notes, "minor version compatibility")."""


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


def check_compiling(lacking: str | None) -> Finding:
    """Check what torch.compile lacks (`engines.cpu_defaults.compiler_lacks`)."""
    if lacking is None:
        return Finding("compiling", "ok", "a C++ compiler and Python's headers")
    text = f"vLLM cannot compile a model for this CPU without {lacking}"
    return Finding("compiling", "warning", text, "install it: decoding is about a third faster then")


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


def check_kernels(
    isas: Callable[[], Sequence[str]],
    kernel: str = "auto",
    cpuinfo: Path = Path("/proc/cpuinfo"),
    compilers: Sequence[str] = ("c++", "g++", "clang++"),
) -> list[Finding]:
    """Check the native kernels, and a compiler if they are missing.

    Args:
        isas: returns the instruction sets of the library that this machine runs, best first.
        kernel: ``workers.kernel``.
        cpuinfo: the kernel's file.
        compilers: names of compilers to look for.
    """
    try:
        built = list(isas())
    except WorkerError as error:
        compiler = next((path for path in map(shutil.which, compilers) if path), None)
        fix = "install a C++ compiler (Debian, Ubuntu: apt-get install build-essential), then hybrid-backend again"
        if compiler:
            fix = f"install hybrid-backend again; {compiler} is there to build them"
        text = f"{' '.join(str(error).split())}; attention runs in torch, several times slower"
        return [Finding("native kernels", "problem" if kernel == "native" else "warning", text, fix)]
    return [Finding("native kernels", "ok", "loaded"), _check_instruction_sets(built, cpuinfo)]


def _check_instruction_sets(built: Sequence[str], cpuinfo: Path) -> Finding:
    try:
        flags = set(re.findall(r"\w+", cpuinfo.read_text().partition("\nflags")[2].partition("\n")[0]))
    except OSError as error:
        return unknown("instruction sets", error, f"nothing to do: {built[0]} is used")
    missing = [name for name, needed in _CPU_FLAGS.items() if needed <= flags and name not in built]
    text = f"{', '.join(built)} (best first)"
    if missing:
        fix = "build with gcc 12 or clang 15 or later; if they stay away, the kernel or hypervisor does not allow them"
        return Finding("instruction sets", "warning", f"{text}; the CPU has {', '.join(missing)} too", fix)
    if built[0] == "generic":
        fix = "use a CPU with AVX2 (x86-64-v3) or more"
        return Finding("instruction sets", "warning", f"{text}: many times slower than AVX2", fix)
    return Finding("instruction sets", "ok", text)


@dataclass(frozen=True)
class TorchBuild:
    """Installed build of torch.

    Attributes:
        version: its version.
        cuda: its CUDA release; None for a CPU build.
        sees_gpu: it can use a GPU.
        gpus: name and memory of each GPU.
    """

    version: str
    cuda: str | None
    sees_gpu: bool
    gpus: tuple[str, ...] = ()


def check_gpu(
    torch_build: TorchBuild | None, proc: Path = Path("/proc"), pci: Path = Path("/sys/bus/pci/devices")
) -> Finding:
    """Check that GPU, driver and torch belong together."""
    driver = _driver(proc)
    if torch_build is not None and torch_build.sees_gpu:
        return Finding("GPU", "ok", f"{'; '.join(torch_build.gpus)}; driver {driver or 'unknown'}")
    if driver is None:
        if gpus := _nvidia_gpus(pci):
            fix = "install NVIDIA's driver; in a container: NVIDIA Container Toolkit and --gpus all"
            return Finding("GPU", "warning", f"{gpus} NVIDIA device(s) without a driver: the CPU serves", fix)
        return Finding("GPU", "ok", "none: the device tier is the CPU")
    if torch_build is None or torch_build.cuda is None:
        fix = "to serve on the GPU, install vllm and torch's CUDA builds in an environment of their own"
        return Finding("GPU", "warning", f"driver {driver}, but torch is a CPU build: the CPU serves", fix)
    oldest = _DRIVERS.get(int(torch_build.cuda.partition(".")[0]))
    if oldest is not None and tuple(int(x) for x in driver.split(".")[:2]) < oldest:
        text = f"driver {driver} is too old for torch's CUDA {torch_build.cuda}"
        fix = f"install driver {'.'.join(map(str, oldest))} or later, or torch for an older CUDA"
        return Finding("GPU", "problem", text, fix)
    fix = "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES; in a container: --gpus all"
    return Finding("GPU", "problem", f"driver {driver}, CUDA build of torch, but torch sees no GPU", fix)


def _driver(proc: Path) -> str | None:
    """Return the version of NVIDIA's kernel module; None without one."""
    try:
        match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", (proc / "driver/nvidia/version").read_text())
    except OSError:
        return None
    return match[1] if match else None


def _nvidia_gpus(pci: Path) -> int:
    """Return the number of NVIDIA's display and 3D controllers (vendor 10de, class 03)."""
    count = 0
    for device in pci.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == "0x10de" and kind.startswith("0x03")
    return count
