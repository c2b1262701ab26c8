"""Paths that users write."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(path: str | os.PathLike[str]) -> Path:
    """With ``~`` resolved; as it is where there is no such home, so that it is the file that is missing."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step, so that a reader sees the old or the new content.

    The new file is created where nothing was: in a folder that is shared with others, a symbolic link that waits under
    its name is removed, and not followed.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with part.open("xb") as file:
        file.write(content)
    part.replace(path)
