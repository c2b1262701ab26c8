"""Folders, packages and builds of torch that stand for other machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybrid_backend.tools.doctor.finding import Finding
from hybrid_backend.tools.doctor.software import (
    TorchBuild,
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
