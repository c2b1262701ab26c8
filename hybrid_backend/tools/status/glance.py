"""The top of the page: the server's state, three answers, and the recommended changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.status import advice
from hybrid_backend.tools.status.model import Answer, Change, Headline, Layer, Level
from hybrid_backend.tools.status.reading import Reading
from hybrid_backend.tools.status.speed import Load, fast, limit
from hybrid_backend.tools.status.words import age, lowered, mass, mean, number, rate

FAIR_MASS = 0.9
"""Attention mass below which a server is not faithful, where nothing is promised."""
_LEVELS: tuple[Level, ...] = ("unknown", "good", "fair", "bad")  # ascending


class Glance(NamedTuple):
    """The judgement of one moment, with the most pressing change first."""

    headline: Headline
    answers: tuple[Answer, ...] = ()
    changes: tuple[Change, ...] = ()


def judge(load: Load) -> Glance:
    """Judge what the server did in the last seconds."""
    is_faithful = faithful(load.last, load.layers)
    answers = (
        replace(is_faithful, question="Is it faithful?"),
        replace(fast(load), question="Is it fast?"),
        replace(limit(load, can_lower_budget=is_faithful.change is None), question="What holds it back?"),
    )
    return Glance(_headline(load, answers), answers, tuple(a.change for a in answers if a.change is not None))


def unjudged(was_read: bool, stale_seconds: float | None, problem: str | None) -> Glance:
    """Return the headline of a server without fresh rates, of which nothing is judged.

    Args:
        was_read: True if there is any reading.
        stale_seconds: time since the last reading, if the server is silent; None after a start.
        problem: the reason why the last reading failed.
    """
    reason = problem or "The server takes long to answer"
    if stale_seconds is None:
        title, detail = "Waiting for the first reading", "The server was asked and has not answered yet."
        if was_read:
            title, detail = "Measuring the first interval", "Rates need two readings."
        return Glance(Headline(state="starting", level="unknown", title=title, detail=detail))
    title, detail = "No server answers", f"{reason}. It is asked again all the time."
    if was_read:
        title = f"No answer for {age(stale_seconds)}"
        detail = f"{reason}. Everything below is as old as the last reading; the server is asked again all the time."
    return Glance(Headline(state="silent", level="bad", title=title, detail=detail))


def _headline(load: Load, answers: tuple[Answer, ...]) -> Headline:
    """Sum up the answers: the worst of their levels, and the verdicts that are not good."""
    *qualities, limits = answers
    poor = [lowered(quality.verdict) for quality in qualities if quality.level in ("fair", "bad")]
    if limits.level in ("fair", "bad"):
        verdict = lowered(limits.verdict)
        poor.append(f"held back, by what is {verdict}" if verdict == "not known" else f"held back by {verdict}")
    level = max((answer.level for answer in answers), key=_LEVELS.index)
    activity = "Decoding well" if level == "good" else "Decoding"
    if load.state != "decoding":
        level = "unknown" if level == "good" else level  # A server that generates nothing is neither fast nor slow.
        reads = "Reading prompts" if load.rates.prompt_per_second else "Working, no token yet"
        activity = "Idle" if load.state == "idle" else reads
    title = f"{activity}: {', '.join(poor)}" if poor else activity
    return Headline(state=load.state, level=level, title=title, detail=_detail(load))


def _detail(load: Load) -> str:
    running, waiting, rates = load.last.running, load.last.waiting, load.rates
    if load.state == "idle":
        return "No request runs or waits."
    texts = [f"{rate(rates.generated_per_second)} tokens/s generated"] if load.state == "decoding" else []
    texts += [f"{number(rates.prompt_per_second)} tokens/s of prompts read"] if rates.prompt_per_second else []
    counts = [] if running is None else [f"{counted(running, 'request')} now"]
    counts += [] if waiting is None else [f"{number(waiting) if waiting else 'none'} waiting"]
    return f"{'; '.join([*texts, ', '.join(counts)])}; means of the last {rates.seconds:.0f} s."


def faithful(last: Reading, layers: Sequence[Layer]) -> Answer:
    """Judge how near attention is to dense attention: by promise, by samples or exactly."""
    promised, measured = last.gauge("quality_min_mass"), last.gauge("quality_mass")
    if promised and measured is not None:
        return _promise(last, promised, measured)
    attended = [layer.attended for layer in layers if layer.attended is not None]
    if attended and min(attended) == 1:
        return Answer("Exact", "What decodes attends every token of its context, in every layer.", "good")
    masses = [(layer.mass_recall, layer.layer) for layer in layers if layer.mass_recall is not None]
    cosines = [(layer.query_cosine, layer.layer) for layer in layers if layer.query_cosine is not None]
    queries = ""
    if cosines:
        worst, layer_index = min(cosines)
        average = mean(cosine for cosine, _ in cosines)
        queries = f" Cosine of predicted and true queries: {average:.2f}, {worst:.2f} in the worst ({layer_index})."
    if not masses:
        text = f"o layer was sampled yet (metrics.sample_interval says how often).{queries}"
        left_out = f"{1 - (mean(attended) or 0):.0%} of the contexts' tokens are left out, and n" if attended else "N"
        return Answer("Not measured", left_out + text, "unknown")
    worst, layer_index = min(masses)
    average = mean(share for share, _ in masses) or 0.0
    text = f"{average:.1%} of the attention mass is kept in sampled layers, {worst:.1%} in the worst ({layer_index}), "
    text += f"means since start.{queries}"
    if average >= advice.MIN_MASS:
        return Answer("Faithful", text, "good")
    if average >= FAIR_MASS:
        return Answer("Nearly faithful", text, "fair", advice.more_faithful(last))
    return Answer("Not faithful", text, "bad", advice.more_faithful(last))


def _promise(last: Reading, promised: float, measured: float) -> Answer:
    budget, kl = last.gauge("quality_budget_tokens") or 0.0, last.gauge("quality_max_kl")
    if math.isinf(budget):
        # Nothing is sampled while all tokens are attended, so the mass is of the time before.
        text = (
            f"The largest budget kept {mass(measured)} of the attention mass when that was last measured, less than "
            f"the promised {100 * promised:.4g}%. So every token is attended; after a while the budget is tried again."
        )
        return Answer("Everything attended", text, "good", advice.keepable_promise(last))
    of_budget = f" at {budget:,.0f} tokens of budget" if budget else ""
    profiled = f", which kept answers within {kl:g} nats of dense attention's where it was profiled" if kl else ""
    text = f"{mass(measured)} of the attention mass is kept{of_budget}; promised: {100 * promised:.4g}%{profiled}."
    return Answer("Promise kept", text, "good") if measured >= promised else Answer("Promise broken", text, "bad")
