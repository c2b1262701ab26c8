"""``hybrid doctor``, ready for typer: all checks, a table or JSON, exit status 1 if there is a problem."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console


def doctor(
    config: Annotated[str | None, typer.Option(help="YAML file, or {...}, to check; default: HYBRID_CONFIG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Check this machine, from engines and memory to the configuration; each finding with its fix."""
    from hybrid_backend.tools.doctor.examination import examine, show
    from hybrid_backend.tools.doctor.finding import has_problem

    findings = examine(config)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        show(findings, Console())
    if has_problem(findings):
        raise typer.Exit(1)
