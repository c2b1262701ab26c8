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
