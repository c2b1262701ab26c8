"""The Triton kernels are compiled, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from bench.triton_compile import PROCESSORS

ROOT = Path(__file__).parents[2]


def compiled(folder: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Return what `bench.triton_compile` reports, by compute capability. No GPU is needed for it."""
    report = folder / "compiled.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")}
    command = [sys.executable, "-m", "bench.triton_compile", "--json", str(report), *options]
    subprocess.run(command, env=environment, check=True, timeout=2700, cwd=ROOT)
    found: dict[str, list[dict[str, Any]]] = json.loads(report.read_text())
    return found


SPILLED = {"120": 8}
"""Bytes that a thread may spill by compute capability: attention over pages of 16 tokens on an RTX 50."""


def test_heads_of_256_channels_fit_the_shared_memory_of_every_gpu_and_hardly_spill(tmp_path: Path) -> None:
    """Three of the six GPUs have 99 KiB for a program; codes of such heads took 104."""
    found = compiled(tmp_path, "--largest")
    assert set(found) == {str(arch) for arch in PROCESSORS}
    for arch, entries in found.items():
        assert {entry["kernel"] for entry in entries} >= {"estimate_kernel", "encode_kernel", "partial_kernel"}
        for entry in entries:
            assert entry["shared"] <= PROCESSORS[int(arch)].most_shared, entry
            assert entry["programs"] > 0 and entry["local"] <= SPILLED.get(arch, 0), entry
    assert len({tuple(entry["registers"] for entry in entries) for entries in found.values()}) > 1, "one GPU, six times"


def test_every_kernel_compiles_for_hopper_and_spills_nothing(tmp_path: Path) -> None:
    """At the shapes of the models that people serve."""
    found = compiled(tmp_path, "--arch", "90")["90"]
    source = "".join(path.read_text() for path in (ROOT / "kernels" / "triton").glob("*.py"))
    assert {entry["kernel"] for entry in found} == set(re.findall(r"def _(\w+_kernel)\(", source))
    assert not [entry for entry in found if entry["local"]]
    assert not [entry for entry in found if "slices" in entry["shape"]], "compiled again for where its lists lie"
    # What crosses the bus, or is read in whole rows, moves 4 to 16 bytes at a time.
    wide = ("copy", "ask", "ask_rows", "take_rows", "store", "partial", "score", "sample")
    narrow = [entry for entry in found if entry["kernel"] in [f"{name}_kernel" for name in wide] and entry["narrow"]]
    assert all("int8" in entry["shape"] for entry in narrow), "scales of 8 bits alone are narrow"
    # Little's law: an H200 reads 4.8 TB/s, and its memory answers after some 700 ns: 25 KiB for each of 132 SMs.
    for kernel in ("partial_kernel", "score_kernel"):
        assert min(entry["under_way"] for entry in found if entry["kernel"] == kernel) >= 25 << 10, kernel
    print(f"\n{len(found)} variants, at most {max(entry['registers'] for entry in found)} registers")
