"""Typer command `hybrid doctor`: a table or JSON; the exit status is 1 if there is a problem."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console


def doctor(
    config: Annotated[str | None, typer.Option(help="YAML file, or {...}, to check; default: HYBRID_CONFIG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Check this machine, from engines and memory to the configuration; each finding with its fix."""
    from hybrid_backend.tools.doctor.examination import examine, show

    findings = examine(config)
    if as_json:
        keys = {"check": "check", "state": "state", "found": "text", "fix": "fix", "checked": "checked"}
        rows = [{key: getattr(finding, name) for key, name in keys.items()} for finding in findings]
        typer.echo(json.dumps(rows, indent=1))
    else:
        show(findings, Console())
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)
