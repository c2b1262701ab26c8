"""Runs the command `hybrid plan` in this process."""

from __future__ import annotations

from typing import Any

import typer
from typer.testing import CliRunner

from hybrid_backend.tools.plan.command import plan


def run(*arguments: str, model: str = "smollm2-135m-instruct", columns: int = 200) -> Any:
    """Return the result of `hybrid plan MODEL ARGUMENTS` on a terminal of ``columns`` columns."""
    alone = typer.Typer()
    alone.command()(plan)
    return CliRunner().invoke(alone, [model, *arguments], env={"COLUMNS": str(columns)})
