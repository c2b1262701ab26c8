"""``LLM(..., attention_backend="CUSTOM")``: the example of docs/reference/vllm.md, run as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.conftest import ROOT

pytestmark = pytest.mark.engine


def test_the_offline_example_answers_with_our_backend(tmp_path: Path) -> None:
    (example,) = re.findall(
        r"^```python\n(from vllm import LLM.*?)^```", (ROOT / "docs" / "reference" / "vllm.md").read_text(), re.M | re.S
    )
    file = tmp_path / "example.py"
    file.write_text(example)
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0 and "Tokyo" in done.stdout, log
    assert log.count("hybrid backend: method quest") == 1, log
