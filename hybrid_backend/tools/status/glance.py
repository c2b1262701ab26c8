"""The page's first words: the server's state, three questions answered, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybrid_backend.hardware import Hardware
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.status.faithful import faithful
from hybrid_backend.tools.status.model import Answer, Change, Headline, Layer, Level, Rates
from hybrid_backend.tools.status.reading import Reading
from hybrid_backend.tools.status.speed import Load, fast, limit
from hybrid_backend.tools.status.words import age, lowered, number, rate

_SEVERITY: dict[Level, int] = {"unknown": 0, "good": 1, "fair": 2, "bad": 3}


class Glance(NamedTuple):
    """The judgement of one moment. ``changes``: the most pressing first."""

    headline: Headline
    answers: tuple[Answer, ...] = ()
    changes: tuple[Change, ...] = ()


def judge(
    last: Reading | None,
    rates: Rates | None,
    layers: Sequence[Layer],
    machine: Hardware | None = None,
    stale_seconds: float | None = None,
    problem: str | None = None,
) -> Glance:
    """Judge what the server did in the last seconds.

    Args:
        last: the last reading; None if there is none.
        rates: what happened up to that reading; None if it is the first one.
        layers: each layer over the last seconds.
        machine: a hardware profile of the server's machine, which attention's speed is compared with.
        stale_seconds: age of the last reading if the server gives no newer one. Then nothing is judged: old numbers
            say nothing of now.
        problem: why the last reading failed.
    """
    if stale_seconds is not None:
        return Glance(_silence(stale_seconds, problem, was_read=last is not None))
    if last is None:
        return _starting("Waiting for the first reading", "The server was asked and has not answered yet.")
    if rates is None:
        return _starting("Measuring the first interval", "Rates need two readings.")
    load = Load(last, rates, layers, machine)
    is_faithful, larger_budget = faithful(last, layers)
    limits, change = limit(load, budget_may_fall=larger_budget is None)
    answers = (is_faithful, fast(load), limits)
    changes = tuple(proposed for proposed in (larger_budget, change) if proposed is not None)
    return Glance(_headline(load, answers), answers, changes)


def _starting(title: str, detail: str) -> Glance:
    return Glance(Headline(state="starting", level="unknown", title=title, detail=detail))


def _silence(stale_seconds: float, problem: str | None, was_read: bool) -> Headline:
    reason = problem or "The server takes long to answer"
    if not was_read:
        detail = f"{reason}. It is asked again all the time."
        return Headline(state="silent", level="bad", title="No server answers", detail=detail)
    detail = f"{reason}. Everything below is as old as the last reading; the server is asked again all the time."
    return Headline(state="silent", level="bad", title=f"No answer for {age(stale_seconds)}", detail=detail)


def _headline(load: Load, answers: tuple[Answer, ...]) -> Headline:
    """Sum up the answers: the worst of their levels, and the verdicts that are not good."""
    is_faithful, is_fast, limits = answers
    poor = [lowered(answer.verdict) for answer in (is_faithful, is_fast) if _SEVERITY[answer.level] > 1]
    if _SEVERITY[limits.level] > 1:
        verdict = lowered(limits.verdict)
        poor.append(f"held back, by what is {verdict}" if verdict == "not known" else f"held back by {verdict}")
    level = max((answer.level for answer in answers), key=lambda level: _SEVERITY[level])
    if load.state == "decoding":
        doing = "Decoding well" if level == "good" else "Decoding"
    else:
        level = "unknown" if level == "good" else level  # a server that generates nothing is neither fast nor slow
        reads = "Reading prompts" if load.rates.prompt_per_second else "Working, no token yet"
        doing = "Idle" if load.state == "idle" else reads
    title = f"{doing}: {', '.join(poor)}" if poor else doing
    return Headline(state=load.state, level=level, title=title, detail=_detail(load))


def _detail(load: Load) -> str:
    running, waiting = load.last.running, load.last.waiting
    if load.state == "idle":
        return "No request runs or waits."
    speeds = [f"{rate(load.rates.generated_per_second)} tokens/s generated"] if load.state == "decoding" else []
    if load.rates.prompt_per_second:
        speeds.append(f"{number(load.rates.prompt_per_second)} tokens/s of prompts read")
    counts = [] if running is None else [f"{counted(running, 'request')} now"]
    if waiting is not None:
        counts.append(f"{number(waiting)} waiting" if waiting else "none waiting")
    return f"{'; '.join([*speeds, ', '.join(counts)])}; means of the last {load.rates.seconds:.0f} s."
