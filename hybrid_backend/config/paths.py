"""Paths in configuration files and on the command line."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(path: str | os.PathLike[str]) -> Path:
    """Resolve ``~`` in a path. A path whose home does not exist stays, so that an error names the missing file."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step, so that a reader sees the old or the new content.

    A symbolic link that another user placed at the temporary name is removed, and not followed.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with part.open("xb") as file:
        file.write(content)
    part.replace(path)
