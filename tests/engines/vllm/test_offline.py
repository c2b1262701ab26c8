"""``LLM(..., attention_backend="CUSTOM")``: the examples without a server, run as a user runs them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.conftest import ROOT

pytestmark = pytest.mark.engine
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(("script", "method"), [("offline.py", "quest"), ("add_method.py", "first_and_last")])
def test_an_offline_example_answers_with_our_backend(tmp_path: Path, script: str, method: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0 and "Tokyo" in done.stdout, log
    assert log.count(f"hybrid backend: method {method},") == 1, log


def test_the_page_shows_the_start_of_the_offline_example() -> None:
    page = (ROOT / "docs" / "reference" / "vllm.md").read_text()
    (shown,) = re.findall(r"^```python\n(from vllm import LLM.*?)^```", page, re.M | re.S)
    on_page, in_example = keywords_of_llm(shown), keywords_of_llm((EXAMPLES / "offline.py").read_text())
    assert in_example.pop("additional_config") and on_page == in_example


def keywords_of_llm(source: str) -> dict[str | None, str]:
    """Return the keyword arguments of the call ``LLM(...)`` in ``source``, and their values as they are written."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    (start,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "LLM"]
    return {keyword.arg: ast.unparse(keyword.value) for keyword in start.keywords}
