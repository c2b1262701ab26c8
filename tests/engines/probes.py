"""Results that a probe, a process of its own, wrote about each of its cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Probe = Callable[[str], dict[str, Any]]


def reader(folder: Path, log: Path) -> Probe:
    """Reads FOLDER/NAME.json; fails with the case's error, or with the log's end if there is no such file."""

    def read(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        assert path.exists(), f"the probe died:\n{log.read_text()[-4000:]}"
        found: dict[str, Any] = json.loads(path.read_text())
        assert "error" not in found, found["error"]
        return found

    return read
