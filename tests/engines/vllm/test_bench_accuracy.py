"""The accuracy bench with an engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.engines.server import executable

pytestmark = pytest.mark.engine


def test_with_the_engine_budgets_follow_the_dense_answers_and_a_larger_one_is_nearer(
    tmp_path: Path, model_dir: Path
) -> None:
    """The command as a user gives it: stock first, then one hybrid server for both budgets."""
    command = [executable("hybrid"), "bench", "accuracy", "--out", str(tmp_path), "--budgets", "128,50%"]
    command += ["--context", "1024", "--samples", "1", "--answer", "24"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    assert [result["source"] for result in results[::2]] == ["lookups", "python-reference", "python-source"]
    assert [result["budget"] for result in results] == ["128", "50%"] * 3
    assert all(1 <= result["positions"] <= 23 for result in results)
    small, large = (sum(result["kl"] for result in results[first::2]) for first in (0, 1))
    assert 0 < large < small
    assert "python-source" in done.stdout and "95 % interval" in done.stdout
