"""The Triton kernels are compiled, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

ROOT = Path(__file__).parents[2]


def test_every_kernel_compiles_for_hopper_and_spills_nothing(tmp_path: Path) -> None:
    """At the shapes of the models that people serve; no GPU is needed for it."""
    report = tmp_path / "compiled.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")}
    command = [sys.executable, "-m", "bench.triton_compile", "--json", str(report)]
    subprocess.run(command, env=environment, check=True, timeout=900, cwd=ROOT)
    found = json.loads(report.read_text())
    source = "".join(path.read_text() for path in (ROOT / "kernels" / "triton").glob("*.py"))
    assert {entry["kernel"] for entry in found} == set(re.findall(r"def _(\w+_kernel)\(", source))
    assert not [entry for entry in found if entry["local"]]
    print(f"\n{len(found)} variants, at most {max(entry['registers'] for entry in found)} registers")
