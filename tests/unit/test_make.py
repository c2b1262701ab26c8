"""`make serve` says which machine it found and which build of the engine it takes."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# A make that runs the tests hands its own variables to the makes below it.
VARIABLES = (
    "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "DEVICE", "ENGINE", "ENGINE_VERSION", "PORT", "CONFIG",
)  # fmt: skip


def make(*words: str, driver: Path) -> subprocess.CompletedProcess[str]:
    """Run make; ``driver`` is a folder with an nvidia-smi, which goes before the machine's own."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with socket.create_server(("127.0.0.1", 0)) as unused:
        environment["PORT"] = str(unused.getsockname()[1])  # The default may be taken by a server of this machine.
    environment["PATH"] = f"{driver}{os.pathsep}{environment['PATH']}"
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def driver(folder: Path, script: str) -> Path:
    """Return ``folder`` with an nvidia-smi in it."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """An nvidia-smi that prints what the driver's prints for two GPUs."""
    return driver(tmp_path, r"printf 'NVIDIA H200\nNVIDIA H200\n'")


@pytest.fixture
def no_gpu(tmp_path: Path) -> Path:
    """An nvidia-smi that ends as the driver's does where it finds no GPU."""
    return driver(tmp_path, "exit 9")


def test_without_a_gpu_the_cpu_build_is_named(no_gpu: Path) -> None:
    assert make("machine", driver=no_gpu).stdout == "==> found no NVIDIA GPU: taking the cpu build of vllm, in .venv\n"


def test_a_machine_with_a_gpu_is_told_how_to_use_it(gpu: Path) -> None:
    first, second = make("machine", driver=gpu).stdout.splitlines()
    assert first == "==> found NVIDIA H200: taking the cpu build of vllm, in .venv"
    assert "make serve DEVICE=cuda" in second and (ROOT / "docs" / "start" / "gpu.md").is_file()
    assert make("machine", "DEVICE=cuda", driver=gpu).stdout == (
        "==> found NVIDIA H200: taking the cuda build of vllm, in .venv-cuda\n"
    )


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (["DEVICE=tpu"], "DEVICE=tpu: write cpu or cuda"),
        (["DEVICE=cuda"], "DEVICE=cuda: nvidia-smi lists no GPU; install NVIDIA's driver, or leave DEVICE out"),
        (["DEVICE=cuda", "ENGINE=sglang"], "DEVICE=cuda: ENGINE=sglang serves on CPUs only"),
        (["ENGINE=foo"], "ENGINE=foo: write vllm or sglang"),
        (["PORT=abc"], "PORT=abc: write a number from 1 to 65535"),
        (["PORT=0"], "PORT=0: write a number from 1 to 65535"),
        (["PORT=65536"], "PORT=65536: write a number from 1 to 65535"),
        (["PORT="], "PORT=: write a number from 1 to 65535"),
        (["CONFIG=nowhere.yaml"], "CONFIG=nowhere.yaml: no such file"),
        (["MODEL=./nowhere"], "MODEL=./nowhere: no such folder or file"),
    ],
)
def test_what_cannot_serve_here_is_refused_before_it_is_installed(
    variables: list[str], told: str, no_gpu: Path
) -> None:
    done = make("machine", *variables, driver=no_gpu)
    assert done.returncode != 0 and told in done.stderr.splitlines()[0] and not done.stdout


def test_a_port_that_is_taken_is_told_before_anything_is_installed(no_gpu: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = make("machine", f"PORT={port}", driver=no_gpu)
    assert done.returncode != 0 and f"PORT={port}: something listens on it already" in done.stderr and not done.stdout


@pytest.mark.parametrize(
    "variables", [["PORT=08001"], ["PORT=65535"], ["CONFIG=configs/default.yaml"], ["CONFIG={sinks: 2}"]]
)
def test_what_can_serve_is_not_refused(variables: list[str], no_gpu: Path) -> None:
    assert make("machine", *variables, driver=no_gpu).returncode == 0


def test_serve_begins_with_the_machine(no_gpu: Path) -> None:
    done = make("-n", "serve", driver=no_gpu)
    assert done.returncode == 0 and done.stdout.index("nvidia-smi") < done.stdout.index("hybrid serve")


def test_serve_says_how_to_watch_the_server_on_its_port(no_gpu: Path) -> None:
    """`hybrid top` looks at port 8000 unless it is told another."""
    done = make("-n", "serve", "PORT=9000", driver=no_gpu)
    assert "source .venv/bin/activate && hybrid top http://localhost:9000" in done.stdout
