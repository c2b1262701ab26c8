"""`make serve` says which machine it found and which build of the engine it takes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def machine(*variables: str, gpu: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the first step of `make serve`; ``gpu`` is a folder with an nvidia-smi."""
    folders = [str(gpu)] if gpu is not None else []
    environment = {**os.environ, "PATH": os.pathsep.join([*folders, "/usr/bin", "/bin"])}
    command = ["make", "--no-print-directory", "machine", *variables]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A folder with an nvidia-smi that prints what the driver's prints for two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nNVIDIA H200\\n'\n")
    program.chmod(0o755)
    return tmp_path


def test_without_a_gpu_the_cpu_build_is_named() -> None:
    assert machine().stdout == "==> found no NVIDIA GPU: taking the cpu build of vllm, in .venv\n"


def test_a_machine_with_a_gpu_is_told_how_to_use_it(gpu: Path) -> None:
    first, second = machine(gpu=gpu).stdout.splitlines()
    assert first == "==> found NVIDIA H200: taking the cpu build of vllm, in .venv"
    assert "make serve DEVICE=cuda" in second and (ROOT / "docs" / "gpu.md").is_file()
    assert machine("DEVICE=cuda", gpu=gpu).stdout == (
        "==> found NVIDIA H200: taking the cuda build of vllm, in .venv-cuda\n"
    )


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (["DEVICE=tpu"], "DEVICE=tpu: write cpu or cuda"),
        (["DEVICE=cuda"], "DEVICE=cuda: nvidia-smi lists no GPU; install NVIDIA's driver, or leave DEVICE out"),
        (["DEVICE=cuda", "ENGINE=sglang"], "DEVICE=cuda: ENGINE=sglang serves on CPUs only"),
    ],
)
def test_a_build_that_cannot_serve_here_is_refused_before_it_is_installed(variables: list[str], told: str) -> None:
    done = machine(*variables)
    assert done.returncode != 0 and told in done.stderr.splitlines()[0] and not done.stdout


def test_serve_begins_with_the_machine() -> None:
    done = subprocess.run(["make", "-n", "serve"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.index("nvidia-smi") < done.stdout.index("hybrid serve")
