"""``hybrid bench agents``, ready for typer. What it needs is imported when it runs: the command line starts at once."""

from __future__ import annotations

import json
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
    from hybrid_backend.tools.bench import report
    from hybrid_backend.tools.bench.agents import Traffic, sessions
    from hybrid_backend.tools.bench.client import Replay, find_endpoint, in_turn, replay
    from hybrid_backend.tools.bench.limits import parse_limits
    from hybrid_backend.tools.bench.output import check_file, writing
    from hybrid_backend.tools.counts import counted

    limits = parse_limits("--good", good, ("ttft", "tpot"))
    traffic = Traffic(
        agents=agents, turns=turns, system=system, task=task, tool=tool, answer=answer, think=think, arrival=arrival,
        calls=calls, seed=seed,
    )  # fmt: skip
    if out is not None:
        check_file(out)
    endpoints = [find_endpoint(named, model, min(deadline, 30)) for named in endpoint]
    console, found = Console(), list[Replay]()
    warm = traffic.model_copy(update={"agents": 1, "turns": 1, "seed": seed - 1})
    for each in endpoints:
        replay(each, sessions(warm), answer, 0, deadline)
    for repeat in range(repeats):
        asked = sessions(traffic.model_copy(update={"seed": seed + repeat}))  # nothing is cached from the run before
        for each in in_turn(endpoints, repeat):
            run = replay(each, asked, answer, repeat, deadline)
            found.append(run)
            done = sum(not one.error for one in run.answers)
            console.print(f"{each.name}: run {repeat + 1} of {repeats}, {counted(done, 'turn')} in {run.seconds:.1f} s")
    found.sort(key=lambda run: [each.name for each in endpoints].index(run.endpoint))
    console.print(report.table(found, traffic, limits))
    if (failure := report.first_error(found)) is not None:
        console.print(f"the first failure: {failure}", soft_wrap=True, markup=False)
    if out is not None:
        with writing(out):
            out.write_text(json.dumps(report.as_json(found, traffic, limits), indent=1) + "\n")
        console.print(f"written: {out}", soft_wrap=True)
