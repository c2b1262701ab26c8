"""Traffic of agents on running servers: sessions of many turns over one system prompt, tool outputs, think time.

    python -m bench.agents stock=http://a:8000 hybrid=http://b:8000 [--agents 16 --turns 12 --system 4000 --tool 800]

Texts, lengths and times follow from the seed, so that all servers get the same requests at the same times. The answers
are each server's own, and part of the next turn's prompt, as in a real session. Servers take turns; every run has other
texts, so that nothing is cached from the run before. Prints a table (docs/lab/throughput.md); ``--out`` has every turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from bench.streams import stream
from hybrid_backend.errors import HybridError
from hybrid_backend.tools.bench.client import BenchError, Endpoint, find_endpoint, headers, rotated
from hybrid_backend.tools.bench.options import parse_limits
from hybrid_backend.tools.bench.report import Figures, Row, comparison

ROWS = (
    Row("answer tokens/s", "answer_tokens_per_second", 1),
    Row("  times the first", "times_first", 2),
    Row("good turns/s", "good_turns_per_second", 3),
    Row("first turn: TTFT, median, s", "first_ttft_median", 2),
    Row("later turns: TTFT, median, s", "ttft_median", 2),
    Row("later turns: TTFT, 90 %, s", "ttft_p90", 2),
    Row("TPOT, median, ms", "tpot_median", 1, 1e3),
    Row("TPOT, 90 %, ms", "tpot_p90", 1, 1e3),
    Row("longest prompt, tokens", "prompt_tokens_most"),
    Row("cached prompt tokens, %", "cached", 0, 100),
    Row("turns answered", "turns"),
    Row("turns failed", "failed"),
)
TEXT = (
    "file line test error value path name index build module return class import commit branch merge patch queue cache "
    "server client request answer token page block table column row user group host port process thread memory disk "
    "time day hour begin end open close read write find list create delete update check start stop wait run call send "
    "ten red green blue left right above below inside outside before after north south east west water stone paper"
)
WORDS = TEXT.split()
TOOL = {"name": "tool", "arguments": "{}"}


@dataclass(frozen=True)
class Traffic:
    """Lengths are in words of about one token each, times in seconds and exponentially distributed.

    ``tool`` is the mean length of a tool's output, ``answer`` the tokens of every answer. With ``calls`` tool outputs
    have the role ``tool`` and answer a call, as chat templates with tools expect.
    """

    agents: int = 4
    turns: int = 6
    system: int = 600
    task: int = 80
    tool: int = 300
    answer: int = 48
    think: float = 1.0
    arrival: float = 1.0
    calls: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """``wait_seconds`` counts from the previous answer, for the first turn from the start of the run."""

    wait_seconds: float
    text: str


@dataclass(frozen=True)
class Answer:
    """The answer to a turn. ``cached_tokens`` is None where the server does not report it."""

    session: int
    turn: int
    ttft: float = 0.0
    tpot: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    answer_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Replay:
    """A run of all sessions against a server."""

    endpoint: str
    repeat: int
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def answer_rate(self) -> float:
        return sum(answer.answer_tokens for answer in self.answers) / self.seconds


def make_sessions(traffic: Traffic) -> tuple[str, list[list[Turn]]]:
    """Return the system prompt and the turns of each agent, which do not depend on the number of agents."""
    system = "You are an agent. " + words(random.Random(f"system {traffic.seed}"), traffic.system)
    arrivals, start_seconds = random.Random(f"arrivals {traffic.seed}"), 0.0
    sessions = []
    for agent in range(traffic.agents):
        sessions.append(list(turns_of(traffic, agent, start_seconds)))
        start_seconds += exponential(arrivals, traffic.arrival)
    return system, sessions


def turns_of(traffic: Traffic, agent: int, start_seconds: float) -> Iterator[Turn]:
    rng = random.Random(f"agent {traffic.seed} {agent}")
    yield Turn(start_seconds, f"Task {agent}: {words(rng, traffic.task)}")
    for _ in range(traffic.turns - 1):
        output = f"Output of the tool: {words(rng, max(1, rng.randint(traffic.tool // 2, traffic.tool * 3 // 2)))}"
        yield Turn(exponential(rng, traffic.think), output)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def exponential(rng: random.Random, mean: float) -> float:
    return rng.expovariate(1 / mean) if mean else 0.0


def replay(endpoint: Endpoint, traffic: Traffic, repeat: int, deadline: float) -> Replay:
    """Run all sessions at once against a server that may be silent for ``deadline`` seconds."""
    start = time.perf_counter()
    answers = asyncio.run(_replay(endpoint, traffic, deadline))
    seconds = time.perf_counter() - start
    for turn in answers:
        if not turn.error and turn.answer_tokens != traffic.answer:
            raise BenchError(
                f"{endpoint.name}: an answer has {turn.answer_tokens} tokens, not {traffic.answer}: the server does "
                "not heed ignore_eos, and cannot be compared"
            )
    return Replay(endpoint.name, repeat, seconds, tuple(answers))


async def _replay(endpoint: Endpoint, traffic: Traffic, deadline: float) -> list[Answer]:
    system, sessions = make_sessions(traffic)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=endpoint.url, headers=headers(), timeout=deadline, limits=limits) as client:
        runs = [_run(client, endpoint.model, traffic, system, *session) for session in enumerate(sessions)]
        return [turn for turns in await asyncio.gather(*runs) for turn in turns]


async def _run(
    client: httpx.AsyncClient, model: str, traffic: Traffic, system: str, number: int, turns: Sequence[Turn]
) -> list[Answer]:
    """Run one session, up to the first turn that fails: later turns need its answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    answers = list[Answer]()
    for index, turn in enumerate(turns):
        await asyncio.sleep(turn.wait_seconds)
        if index and traffic.calls:
            call = f"call_{number}_{index}"
            messages[-1]["tool_calls"] = [{"id": call, "type": "function", "function": TOOL}]
            messages.append({"role": "tool", "tool_call_id": call, "content": turn.text})
        else:
            messages.append({"role": "user", "content": turn.text})
        body = {"model": model, "messages": messages, "max_tokens": traffic.answer}
        try:
            reply = await stream(client, "/v1/chat/completions", body)
            if not reply.text:
                raise ValueError("the stream ended without text")
        except (httpx.HTTPError, ValueError) as error:
            return [*answers, Answer(number, index, error=str(error) or type(error).__name__)]
        first, last = reply.times[0], reply.times[-1]
        tpot = (last - first) / max(1, reply.answer_tokens - 1)
        counts = reply.prompt_tokens, reply.cached_tokens, reply.answer_tokens
        answers.append(Answer(number, index, first, tpot, *counts))
        messages.append({"role": "assistant", "content": reply.text})
    return answers


def figures_of(replays: Sequence[Replay], limits: Mapping[str, float]) -> dict[str, Figures]:
    """Return the figures of each endpoint by their key in `ROWS`, one value per run; turns are sums over the runs.

    The first run's endpoint is the one that others are compared with, run by run. ``limits`` are those of a good turn,
    in milliseconds by ``ttft`` and ``tpot``.
    """
    first = {run.repeat: run.answer_rate for run in replays if run.endpoint == replays[0].endpoint}
    figures: dict[str, dict[str, list[float]]] = {}
    for run in replays:
        endpoint = figures.setdefault(run.endpoint, {row.key: [] for row in ROWS})
        if first.get(run.repeat):
            endpoint["times_first"].append(run.answer_rate / first[run.repeat])
        for key, value in run_figures(run, limits).items():
            endpoint[key] += [] if value is None else [value]
    for endpoint in figures.values():
        endpoint.update({key: [sum(endpoint[key])] for key in ("turns", "failed")})
    return dict(figures)


def run_figures(run: Replay, limits: Mapping[str, float]) -> dict[str, float | None]:
    """Return the figures of one run; None where no turn has the figure."""
    done = [answer for answer in run.answers if not answer.error]
    reported = [answer for answer in done if answer.cached_tokens is not None]
    cached_tokens = sum(answer.cached_tokens or 0 for answer in reported)
    first, later = ([answer.ttft for answer in done if bool(answer.turn) is is_later] for is_later in (False, True))
    tpot = [answer.tpot for answer in done]
    good = [all(getattr(answer, name) * 1e3 <= limit for name, limit in limits.items()) for answer in done]
    return {
        "answer_tokens_per_second": run.answer_rate,
        "good_turns_per_second": sum(good) / run.seconds,
        "first_ttft_median": percentile(first, 50),
        "ttft_median": percentile(later, 50),
        "ttft_p90": percentile(later, 90),
        "tpot_median": percentile(tpot, 50),
        "tpot_p90": percentile(tpot, 90),
        "prompt_tokens_most": max((answer.prompt_tokens for answer in done), default=0),
        "cached": cached_tokens / sum(answer.prompt_tokens for answer in reported) if reported else None,
        "turns": len(done),
        "failed": len(run.answers) - len(done),
    }


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the median, or for other percentiles the measured value just below it; None without values."""
    return float(np.percentile(values, percent, method="linear" if percent == 50 else "lower")) if values else None


def main(line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", nargs="+", help="NAME=URL of running servers; the first is the reference")
    for name, default in asdict(Traffic()).items():
        options = {"action": "store_true"} if isinstance(default, bool) else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", **options)
    parser.add_argument("--repeats", type=int, default=3, help="runs against each server, taking turns")
    parser.add_argument("--good", default="ttft:5000,tpot:200", help="limits of a good turn, in milliseconds")
    parser.add_argument("--deadline", type=float, default=600, help="seconds that a server may be silent")
    parser.add_argument("--out", type=Path, help="file for all numbers as JSON")
    given = parser.parse_args(line)
    limits = parse_limits("--good", given.good, ("ttft", "tpot"))
    traffic = Traffic(**{name: getattr(given, name) for name in asdict(Traffic())})
    servers = [find_endpoint(argument, None, 30) for argument in given.endpoint]
    runs = list[Replay]()
    for server in servers:  # a warm-up
        replay(server, replace(traffic, agents=1, turns=1, seed=traffic.seed - 1), 0, given.deadline)
    for repeat in range(given.repeats):
        for server in rotated(servers, repeat):
            runs.append(replay(server, replace(traffic, seed=traffic.seed + repeat), repeat, given.deadline))
            print(f"{server.name}: run {repeat + 1} of {given.repeats}, {runs[-1].seconds:.1f} s", flush=True)
    runs.sort(key=lambda run: [server.name for server in servers].index(run.endpoint))
    figures = figures_of(runs, limits)
    Console().print(comparison(f"{traffic.agents} agents; good: {given.good}", {"": figures}, ROWS))
    errors = [f"{run.endpoint}: {turn.error}" for run in runs for turn in run.answers if turn.error]
    if errors:
        print(f"the first failure: {errors[0]}")
    if given.out:
        record = {"machine": platform.platform(), "traffic": asdict(traffic), "good": limits, "figures": figures}
        given.out.write_text(json.dumps({**record, "runs": [asdict(run) for run in runs]}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except HybridError as error:
        sys.exit(f"error: {error}")
