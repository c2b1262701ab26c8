"""Probes: programs that start engines in a process of their own, and write what they saw of each of their cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Probe = Callable[[str], dict[str, Any]]


def run(folder: Path, script: str, *arguments: str, seconds: float, paths: Sequence[Path] = ()) -> Probe:
    """Run ``SCRIPT FOLDER ARGUMENT...`` to its end, a program beside this module. Returns the reader of its results.

    A probe that takes longer than ``seconds`` is killed; of the cases that it did not come to, the reader shows its
    log. ``paths`` are added to Python's; vLLM's probes import this repository from the first of them. ``-P``: the
    repository's ``kernels`` must not hide the package of that name, which SGLang imports.
    """
    log, command = folder / "log", [sys.executable, "-P", Path(__file__).parent / script, folder, *arguments]
    known = filter(None, [*map(str, paths), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(known)}
    with log.open("ab") as sink, suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, stdout=sink, stderr=sink, cwd=ROOT, timeout=seconds, check=False)
    return reader(folder)


def reader(folder: Path) -> Probe:
    """Return the reader of FOLDER/NAME.json. It fails with the case's error, or with the log's end if there is none."""

    def read(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        assert path.exists(), f"the probe died:\n{(folder / 'log').read_text()[-4000:]}"
        found: dict[str, Any] = json.loads(path.read_text())
        assert "error" not in found, found["error"]
        return found

    return read


def write(folder: Path, name: str, case: Callable[[], dict[str, Any]]) -> None:
    """In a probe: write what ``case`` returns, or its error, so that one case never hides another."""
    try:
        found = case()
    except Exception:
        found = {"error": traceback.format_exc()}
    (folder / f"{name}.json").write_text(json.dumps(found))
