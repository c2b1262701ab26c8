"""The scripts of examples/ without a server: what they say. tests/engines/vllm has what they do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.server import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "connection.py")
CLIENTS = [name for name in SCRIPTS if "from connection import" in (EXAMPLES / name).read_text()]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / script, *arguments]
    return subprocess.run(command, input="Hello\n", capture_output=True, text=True, timeout=120, check=False)


def test_the_readme_has_a_line_for_each_script() -> None:
    lines = (EXAMPLES / "README.md").read_text().splitlines()
    for script in SCRIPTS:
        assert len([line for line in lines if line.startswith(f"| [{script}]({script}) |")]) == 1, script


def test_a_method_takes_sixty_lines() -> None:
    assert len((EXAMPLES / "add_method.py").read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_a_script_does(script: str) -> None:
    done = run(script, "--help")
    first_line = str(ast.get_docstring(ast.parse((EXAMPLES / script).read_text()))).splitlines()[0]
    assert done.returncode == 0 and first_line in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", CLIENTS)
def test_without_a_server_a_script_says_how_to_start_one(script: str) -> None:
    done = run(script, "--url", f"http://localhost:{free_port()}/v1")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("error: no server answers at http://localhost:") and "make serve" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run("budgets.py", "--prompt-file", str(tmp_path / "none.txt"))
    assert done.returncode == 2 and done.stderr.endswith(f"{tmp_path / 'none.txt'}: No such file or directory\n")
