"""The tests that need no engine are there where no engine is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_ENGINES = "import sys\nsys.modules['vllm'] = sys.modules['sglang'] = None\n"


def test_tests_without_an_engine_are_collected_where_none_is_installed(tmp_path: Path) -> None:
    """The same ones as here."""
    (tmp_path / "without_engines.py").write_text(WITHOUT_ENGINES)
    command = [sys.executable, "-m", "pytest", "tests", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not engine and not gpu"]
    found = []
    # SGLang is in an environment of its own: without vLLM its tests must be collected too.
    for more in (["--ignore", "tests/engines/sglang"], ["-p", "without_engines"]):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:]
        found.append({line for line in done.stdout.splitlines() if "::" in line})
    assert found[0] and found[0] == found[1]
