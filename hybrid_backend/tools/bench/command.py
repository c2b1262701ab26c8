"""``hybrid bench agents``, ready for typer. Imports are late, so that the command line starts at once."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def agents(
    endpoint: Annotated[list[str], typer.Argument(help="NAME=URL of running servers; the first is the reference")],
    agents: Annotated[int, typer.Option(min=1, help="sessions at once")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="of each session")] = 6,
    system: Annotated[int, typer.Option(min=1, help="words of the system prompt that all agents share")] = 600,
    task: Annotated[int, typer.Option(min=1, help="words of a session's first message")] = 80,
    tool: Annotated[int, typer.Option(min=1, help="words of a tool's output, on average")] = 300,
    answer: Annotated[int, typer.Option(min=2, help="tokens of every answer")] = 48,
    think: Annotated[float, typer.Option(min=0, help="seconds between an answer and the next turn, on average")] = 1.0,
    arrival: Annotated[float, typer.Option(min=0, help="seconds between two agents' first turns, on average")] = 1.0,
    calls: Annotated[
        bool, typer.Option("--calls", help="tools' outputs have the role tool and answer calls; default: the user's")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="runs against each server, taking turns")] = 3,
    seed: Annotated[int, typer.Option(help="of all texts and times")] = 0,
    good: Annotated[str, typer.Option(help="limits of a good turn, in milliseconds")] = "ttft:5000,tpot:200",
    model: Annotated[str | None, typer.Option(help="the servers' name of it; default: the first they list")] = None,
    deadline: Annotated[float, typer.Option(min=1, help="seconds that a server may be silent")] = 600,
    out: Annotated[Path | None, typer.Option(help="file for all numbers as JSON")] = None,
) -> None:
    """Replay the traffic of agents against running servers: shared prefixes, tool outputs, think time; compare them."""
    from hybrid_backend import __version__
    from hybrid_backend.tools.bench.agents import Traffic, make_sessions
    from hybrid_backend.tools.bench.client import find_endpoint, rotated
    from hybrid_backend.tools.bench.options import check_out, format_limits, parse_limits, writing
    from hybrid_backend.tools.bench.replay import ROWS, Replay, figures_of, replay, summaries
    from hybrid_backend.tools.bench.report import comparison
    from hybrid_backend.tools.counts import counted

    limits = parse_limits("--good", good, ("ttft", "tpot"))
    traffic = Traffic(
        agents=agents, turns=turns, system=system, task=task, tool=tool, answer=answer, think=think, arrival=arrival,
        calls=calls, seed=seed,
    )  # fmt: skip
    if out is not None:
        check_out(out.parent, out)
    servers = [find_endpoint(argument, model, min(deadline, 30)) for argument in endpoint]
    console, runs = Console(), list[Replay]()
    warm_up = make_sessions(traffic.model_copy(update={"agents": 1, "turns": 1, "seed": seed - 1}))
    for server in servers:
        replay(server, warm_up, answer, 0, deadline)
    for repeat in range(repeats):
        # Another seed per run, so that no prompt is in the prefix cache from the run before.
        sessions = make_sessions(traffic.model_copy(update={"seed": seed + repeat}))
        for server in rotated(servers, repeat):
            run = replay(server, sessions, answer, repeat, deadline)
            runs.append(run)
            done = sum(not turn.error for turn in run.answers)
            console.print(
                f"{server.name}: run {repeat + 1} of {repeats}, {counted(done, 'turn')} in {run.seconds:.1f} s"
            )
    runs.sort(key=lambda run: [server.name for server in servers].index(run.endpoint))
    figures = figures_of(runs, limits)
    size = f"{counted(agents, 'agent')}, {counted(turns, 'turn')} of {answer} tokens, {counted(repeats, 'run')}"
    console.print(comparison(f"{size}; good: {format_limits(limits)}", {"": figures}, ROWS))
    errors = [f"{run.endpoint}: {turn.error}" for run in runs for turn in run.answers if turn.error]
    if errors:
        console.print(f"the first failure: {errors[0]}", soft_wrap=True, markup=False)
    if out is not None:
        record = {
            "version": __version__, "machine": platform.platform(), "traffic": traffic.model_dump(), "good": limits,
            "endpoints": summaries(figures), "runs": [run.model_dump() for run in runs],
        }  # fmt: skip
        with writing(out):
            out.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"written: {out}", soft_wrap=True)
