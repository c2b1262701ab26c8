"""Replays of agents' sessions against a server, and the figures that follow from the times of the answers."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from pydantic import BaseModel, ConfigDict

from hybrid_backend.tools.bench.agents import Session
from hybrid_backend.tools.bench.client import BenchError, Endpoint, headers, stream
from hybrid_backend.tools.bench.report import Figures, Row
from hybrid_backend.tools.counts import counted

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
_TOOL = {"name": "tool", "arguments": "{}"}


class Answer(BaseModel):
    """The answer to one turn. Times are in seconds.

    ``tpot`` is the time per token after the first. ``cached_tokens`` is None where the server does not report it.
    ``error`` is empty unless the turn failed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    session: int
    turn: int
    ttft: float = 0.0
    tpot: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    answer_tokens: int = 0
    error: str = ""


class Replay(BaseModel):
    """A run of all sessions against a server."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    endpoint: str
    repeat: int
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def answer_rate(self) -> float:
        """Answer tokens per second of all sessions."""
        return sum(answer.answer_tokens for answer in self.answers) / self.seconds


def replay(endpoint: Endpoint, sessions: Sequence[Session], answer: int, repeat: int, deadline: float) -> Replay:
    """Run all sessions at once against a server that may be silent for ``deadline`` seconds.

    Raises:
        BenchError: an answer has not ``answer`` tokens, so that the server cannot be compared.
    """
    start = time.perf_counter()
    answers = asyncio.run(_replay(endpoint, sessions, answer, deadline))
    seconds = time.perf_counter() - start
    for turn in answers:
        if not turn.error and turn.answer_tokens != answer:
            raise BenchError(
                f"{endpoint.name}: an answer has {counted(turn.answer_tokens, 'token')}, not {answer}: the server does "
                "not heed ignore_eos, and cannot be compared"
            )
    return Replay(endpoint=endpoint.name, repeat=repeat, seconds=seconds, answers=tuple(answers))


async def _replay(endpoint: Endpoint, sessions: Sequence[Session], answer: int, deadline: float) -> list[Answer]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=endpoint.url, headers=headers(), timeout=deadline, limits=limits) as client:
        runs = [_run(client, endpoint.model, number, session, answer) for number, session in enumerate(sessions)]
        return [turn for turns in await asyncio.gather(*runs) for turn in turns]


async def _run(client: httpx.AsyncClient, model: str, number: int, session: Session, answer: int) -> list[Answer]:
    """Run one session, up to the first turn that fails: later turns need its answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": session.system}]
    answers = list[Answer]()
    for index, turn in enumerate(session.turns):
        await asyncio.sleep(turn.wait_seconds)
        if turn.is_tool_output:
            call = f"call_{number}_{index}"
            messages[-1]["tool_calls"] = [{"id": call, "type": "function", "function": _TOOL}]
            messages.append({"role": "tool", "tool_call_id": call, "content": turn.text})
        else:
            messages.append({"role": "user", "content": turn.text})
        body = {"model": model, "messages": messages, "max_tokens": answer}
        try:
            reply = await stream(client, "/v1/chat/completions", body)
            if not reply.text:
                raise ValueError("the stream ended without text")
        except (httpx.HTTPError, ValueError) as error:
            answers.append(Answer(session=number, turn=index, error=str(error) or type(error).__name__))
            break
        first, last = reply.times[0], reply.times[-1]
        tpot = (last - first) / max(1, reply.answer_tokens - 1)
        answers.append(
            Answer(
                session=number, turn=index, ttft=first, tpot=tpot, seconds=last, prompt_tokens=reply.prompt_tokens,
                cached_tokens=reply.cached_tokens, answer_tokens=reply.answer_tokens,
            )
        )  # fmt: skip
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
        for key, value in _figures(run, limits).items():
            endpoint[key] += [] if value is None else [value]
    for endpoint in figures.values():
        endpoint.update({key: [sum(endpoint[key])] for key in ("turns", "failed")})
    return dict(figures)


def _figures(run: Replay, limits: Mapping[str, float]) -> dict[str, float | None]:
    """Return the figures of one run; None where no turn has the figure."""
    done = [answer for answer in run.answers if not answer.error]
    reported = [answer for answer in done if answer.cached_tokens is not None]
    cached_tokens = sum(answer.cached_tokens or 0 for answer in reported)
    first, later = ([answer.ttft for answer in done if bool(answer.turn) is is_later] for is_later in (False, True))
    tpot = [answer.tpot for answer in done]
    return {
        "answer_tokens_per_second": run.answer_rate,
        "good_turns_per_second": sum(is_good(answer, limits) for answer in run.answers) / run.seconds,
        "first_ttft_median": _percentile(first, 50),
        "ttft_median": _percentile(later, 50),
        "ttft_p90": _percentile(later, 90),
        "tpot_median": _percentile(tpot, 50),
        "tpot_p90": _percentile(tpot, 90),
        "prompt_tokens_most": max((answer.prompt_tokens for answer in done), default=0),
        "cached": cached_tokens / sum(answer.prompt_tokens for answer in reported) if reported else None,
        "turns": len(done),
        "failed": len(run.answers) - len(done),
    }


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Return whether a turn was answered within the limits, in milliseconds by ``ttft`` and ``tpot``."""
    return not answer.error and all(getattr(answer, name) * 1e3 <= limit for name, limit in limits.items())


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the median, or for other percentiles the measured value just below it; None without values."""
    return float(np.percentile(values, percent, method="linear" if percent == 50 else "lower")) if values else None


def summaries(figures: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """Return the medians and ranges of each endpoint's figures, as the JSON record has them."""
    return [
        {
            "endpoint": endpoint,
            **{key: statistics.median(values) if values else None for key, values in endpoint_figures.items()},
            "range": {key: [min(values), max(values)] for key, values in endpoint_figures.items() if values},
        }
        for endpoint, endpoint_figures in figures.items()
    ]
