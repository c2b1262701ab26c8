"""Files that peers read, made from a model of the catalogue and kept beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(target: Path, make: Callable[[Path], Path]) -> Path:
    """Return ``target``, made first if it does not exist: whole, or not at all.

    ``make`` gets an empty folder beside ``target``, and returns the path that it made there.
    """
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as work:
            make(Path(work)).rename(target)
    return target
