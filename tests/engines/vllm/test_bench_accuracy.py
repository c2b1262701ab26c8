"""The accuracy bench with an engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.engines.server import executable

pytestmark = pytest.mark.engine


def bench(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user gives it."""
    command = [executable("hybrid"), "bench", "accuracy", "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=out, timeout=900)


def test_with_the_engine_a_sparse_method_is_scored_and_followed(tmp_path: Path, model_dir: Path) -> None:
    """One server at a time: stock, then scout with a quarter of the context, its question decoded token by token."""
    arguments = ["--tasks", "niah_multikey_1", "--lengths", "400", "--budgets", "128", "--question", "decode"]
    arguments += ["--methods", "scout", "--samples", "1"]
    first = bench(tmp_path, *arguments)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    stock, scout = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert (stock["key"]["method"], scout["key"]["method"]) == ("stock", "scout")
    assert scout["positions"] > 0 and stock["text"]
    assert 0.3 < scout["mass"] < 1.0 and scout["kl"] > 0
    assert (tmp_path / "report.png").exists() and "scout@128" in (tmp_path / "report.md").read_text()
