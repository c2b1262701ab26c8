"""Cores, kernels, NUMA nodes, compilers and memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_backend.errors import WorkerError
from hybrid_backend.host_memory import System
from hybrid_backend.tools.doctor.finding import Finding
from hybrid_backend.tools.doctor.machine import (
    check_compiling,
    check_cores,
    check_kernels,
    check_memlock,
    check_numa,
    check_ram,
    check_shm,
)
from tests.unit.doctor.machines import GIB, states, write


def refuse(message: str) -> Callable[[], list[str]]:
    def isas() -> list[str]:
        raise WorkerError(message)

    return isas


def test_missing_native_kernels_are_told_and_a_problem_where_they_are_required() -> None:
    message = "the native CPU kernels were not built"
    (finding,) = check_kernels(refuse(message))
    assert finding.state == "warning" and message in finding.text and "build-essential" in finding.fix
    assert check_kernels(refuse(message), kernel="native")[0].state == "problem"


@pytest.mark.parametrize(
    ("built", "flags", "state", "text"),
    [
        (["neon", "generic"], "fp asimd asimddp", "ok", "neon, generic (best first)"),
        (["generic"], "fp asimd asimddp", "warning", "the CPU has neon too"),
        (["avx2", "generic"], "sse4_2 avx2 fma f16c", "ok", "avx2, generic (best first)"),
        (["generic"], "sse4_2", "warning", "slower than AVX2"),
        (["generic"], "avx2 fma f16c", "warning", "the CPU has avx2 too"),
        (["avx2"], "avx2 fma f16c amx_tile amx_bf16", "warning", "has amx too"),
        (["avx2", "generic"], "avx2 fma f16c amx_tile", "ok", "avx2"),
    ],
)  # fmt: skip
def test_instruction_sets_that_the_library_lacks_are_told(
    tmp_path: Path, built: list[str], flags: str, state: str, text: str
) -> None:
    key = "Features" if "asimd" in flags else "flags\t"  # as Linux has it on AArch64 and on x86
    cpuinfo = write(tmp_path, {"cpuinfo": f"processor\t: 0\n{key}\t: {flags}\nbugs\t\t: none\n"}) / "cpuinfo"
    finding = check_kernels(lambda: built, cpuinfo=cpuinfo)[-1]
    assert (finding.check, finding.state) == ("instruction sets", state)
    assert text in finding.text
    assert "cannot be checked" in check_kernels(lambda: built, cpuinfo=tmp_path / "absent")[-1].text


@pytest.mark.parametrize(
    ("cpus", "files", "state", "text"),
    [
        (16, {}, "ok", "16 CPUs"),
        (2, {}, "warning", "2 CPUs"),
        (16, {"cpu.max": "200000 100000\n"}, "warning", "2 of 16 CPUs"),
        (16, {"cpu.max": "max 100000\n"}, "ok", "16 CPUs"),
        (16, {"cpu/cpu.cfs_quota_us": "800000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "ok", "8 of 16 CPUs"),
        (16, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "ok", "16 CPUs"),
    ],
)
def test_few_cores_are_told_and_a_quota_counts(
    tmp_path: Path, cpus: int, files: dict[str, str], state: str, text: str
) -> None:
    finding = check_cores(cpus, cgroup=write(tmp_path, files))
    assert finding.state == state
    assert text in finding.text


def test_what_compiling_lacks_is_a_warning_with_its_fix() -> None:
    assert check_compiling(lambda: None).state == "ok"
    finding = check_compiling(lambda: "Python's headers (python3-dev)")
    assert finding.state == "warning" and "python3-dev" in finding.text and finding.fix


def test_numa_nodes_and_library(tmp_path: Path) -> None:
    two = write(tmp_path, {"two/node0/cpulist": "0-3", "two/node1/cpulist": "4-7", "two/has_cpu": ""}) / "two"
    one = write(tmp_path, {"one/node0/cpulist": "0-3"}) / "one"
    libc = "libc.so.6"
    assert states(check_numa("auto", one, libc)) == {"NUMA library": "ok", "NUMA nodes": "ok"}
    assert states(check_numa(1, two, libc))["NUMA nodes"] == "ok"
    spread = check_numa("auto", two, libc)[-1]
    assert spread.state == "warning"
    assert "workers.numa: 0" in spread.fix
    absent = check_numa(1, one, libc)[-1]
    assert (absent.state, absent.text) == ("problem", "workers.numa: 1, but there is node 0")
    missing = check_numa("auto", one, "libnosuchnuma.so.9")[0]
    assert missing.state == "problem"
    assert "apt-get install libnuma1" in missing.fix
    assert "cannot be checked" in check_numa("auto", tmp_path / "none", libc)[-1].text


def meminfo(folder: Path, gib: float, **files: str) -> System:
    """/proc and /sys/fs/cgroup of a machine with so much available memory."""
    write(folder, {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {int(gib * 2**20)} kB\n", **files})
    return System(folder / "proc", folder / "cgroup", folder / "nodes")


def test_a_pool_larger_than_memory_is_a_problem(tmp_path: Path) -> None:
    here = meminfo(tmp_path, 32)
    found = "32.0 GiB available on this machine; host pool 16GiB"
    assert check_ram(16 * GIB, system=here) == Finding("RAM", "ok", found)
    assert "host pool 16.0 GiB (auto" in check_ram(None, system=here).text
    finding = check_ram(33 * GIB, system=here)
    assert finding.state == "problem"
    assert "host_pool.size: 33GiB" in finding.fix and "at most 31232MiB" in finding.fix
    assert check_ram(None, system=meminfo(tmp_path, 2)).state == "warning"


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    """Which limits are read: tests/unit/test_host_memory.py."""
    limits = {"cgroup/memory.max": f"{10 * GIB}\n", "cgroup/memory.current": f"{4 * GIB}\n"}
    finding = check_ram(None, system=meminfo(tmp_path, 64, **limits))
    assert finding.text.startswith("6.0 GiB left under the container's")


def test_memory_that_cannot_be_read_is_said_to_be_unknown(tmp_path: Path) -> None:
    assert "cannot be checked" in check_ram(None, system=System(proc=tmp_path)).text


def test_small_shared_memory_is_told(tmp_path: Path) -> None:
    assert check_shm(tmp_path / "absent").state == "problem"
    assert check_shm(tmp_path, least=1).state == "ok"
    small = check_shm(tmp_path, least=2**60)
    assert small.state == "warning"
    assert "--shm-size=2g" in small.fix


@pytest.mark.parametrize(
    ("limit", "pool", "state"),
    [
        (8 * 2**20, None, "warning"),
        (8 * 2**20, 64 * GIB, "warning"),
        (128 * GIB, 64 * GIB, "ok"),
        (resource.RLIM_INFINITY, None, "ok"),
    ],
)
def test_the_limit_of_pinned_memory_is_compared_with_the_pool(limit: int, pool: int | None, state: str) -> None:
    finding = check_memlock(pool, limit)
    assert finding.state == state
    assert finding.state == "ok" or "memlock=-1" in finding.fix
