"""matplotlib, which only pictures need: a command without it leaves them out."""

from __future__ import annotations

from importlib.util import find_spec

from rich.console import Console


def can_draw(console: Console) -> bool:
    """Check for matplotlib, and say in one line if pictures are left out. A long run calls it before, not after."""
    if find_spec("matplotlib") is not None:
        return True
    console.print("pictures are left out: matplotlib is not installed (pip install matplotlib)", soft_wrap=True)
    return False
