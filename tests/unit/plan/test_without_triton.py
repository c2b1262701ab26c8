"""Where Triton cannot be imported, a GPU's memory can be planned, and kernels are refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plan.test_model import write_config

pytestmark = pytest.mark.slow

# In front of a program: whoever imports Triton finds none.
WITHOUT_TRITON = "import sys; sys.modules['triton'] = None; "
COMMAND = "from hybrid_backend.cli import app; app()"


def plan(program: str, folder: Path) -> dict[str, Any]:
    """What `hybrid plan` says of both methods that run kernels on a GPU, as JSON."""
    asked = [str(folder), "--machine", "a100", "--context", "64k", "--batch", "8", "--json"]
    asked += ["--method", "scout", "--method", "infinigen", "--set", "budget_tokens=2048"]
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", *asked], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def test_the_plan_for_a_gpu_is_the_same_without_triton(tmp_path: Path) -> None:
    """Sizes of a long context, where slots, mailboxes and the residency map are all there."""
    folder = write_config(tmp_path / "m", max_position_embeddings=131072)
    found = plan(WITHOUT_TRITON + COMMAND, folder)
    assert found == plan(COMMAND, folder)
    rows = {row["name"]: row for row in found["rows"]}
    for method in ("scout", "infinigen"):
        assert rows[method]["refused"] is None and rows[method]["max_batch"] > 0


def test_kernels_that_would_run_are_refused_in_one_line() -> None:
    program = """
import torch
from hybrid_backend.errors import ConfigError
from tests.support.harness import Engine, config, spec
try:
    Engine(config(method="scout", device_kernels="triton"), spec())
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON + program], capture_output=True, text=True, timeout=300, check=False,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.stdout.count("\n") == 1 and "pip install triton" in done.stdout, done.stdout + done.stderr
