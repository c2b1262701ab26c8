"""The answers at the top of the page: is it faithful, is it fast, what holds it back, and what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybrid_backend.tools.status import advice
from hybrid_backend.tools.status.history import WINDOW
from hybrid_backend.tools.status.model import Answer, Column, Layer, Level
from hybrid_backend.tools.status.reading import Reading

KEPT_WELL, KEPT = advice.MIN_MASS, 0.9
"""Of the attention mass: above the first the answer is good, below the second bad, where nothing is promised."""
WAITS = 0.1
"""Share of the time that the device tier waits for CPU workers, above which it is said to be held back by them."""
FULL = 0.9
"""Of the host pool."""
MOSTLY = 0.5
"""Share of the time that attention in place, or the bus with copies, takes, above which it is said to hold a server
back."""


@dataclass(frozen=True)
class _Load:
    """What the last seconds were spent on; shares of the time."""

    waits: float
    """For CPU partials. Waits for copies are counted nowhere."""
    counts_waits: bool
    """Whether any is, by what is served or was counted since start: else 0 says nothing."""
    copied: float
    """Bytes per second."""
    bus: float | None
    """What the copies take, at what the bus carries; None: that is not known."""
    prompts: float
    """Tokens per second."""
    attention: float | None
    """In place."""
    fill: float
    """Of the host pool."""
    most_running: float
    """Requests at once."""

    @classmethod
    def of(cls, last: Reading, recent: Sequence[Column]) -> _Load:
        waits = _mean(recent, lambda column: column.wait_share) or 0
        copied = _mean(recent, lambda column: column.copied_bytes_per_second) or 0
        carries = last.gauges.get("hybrid_bus_bytes_per_second")
        return cls(
            waits=waits,
            counts_waits="hybrid_recall_interval" in last.gauges  # `scout`, which may not have waited yet
            or any(layer.wait_seconds or layer.cpu_tokens for layer in last.layers)
            or waits > 0,
            copied=copied,
            bus=copied / carries if carries else None,
            prompts=_mean(recent, lambda column: column.prompt_per_second) or 0,
            attention=_mean(recent, lambda column: column.attention_share),
            fill=last.pool_fill or 0,
            most_running=max([last.running or 0, *(column.running or 0 for column in recent)]),
        )

    @property
    def is_held_by_bus(self) -> bool:
        """Copies go on beside the step, and what is waited for them is not counted. So the time that they take is held
        against the time that is waited for the CPU: the larger one, if it is most of the time."""
        return self.bus is not None and self.bus > max(MOSTLY, self.waits)


def glance(last: Reading, columns: Sequence[Column], layers: Sequence[Layer]) -> tuple[Answer, ...]:
    """In the order in which a user asks. The last one is there only where something should be changed."""
    recent = [column for column in columns if columns[-1].time - column.time < WINDOW]
    load = _Load.of(last, recent)
    faithful, more_budget = _faithful(last, layers)
    limit, change = _limit(last, load, layers, budget_may_fall=not more_budget)
    answers = [faithful, _fast(last, load, recent), limit]
    changes = [text for text in (more_budget, change) if text]
    if changes:
        answers.append(Answer(question="What to change", text="\n".join(changes), level="unknown"))
    return tuple(answers)


def _faithful(last: Reading, layers: Sequence[Layer]) -> tuple[Answer, str]:
    """And what to do about it, perhaps."""
    promised, kept = last.gauges.get("hybrid_quality_min_mass"), last.gauges.get("hybrid_quality_mass")
    if promised and kept is not None:
        text, level, change = _of_promise(last, promised, kept)
    else:
        text, level, change = _of_samples(last, layers)
    return Answer(question="Is it faithful?", text=text, level=level), change


def _of_promise(last: Reading, promised: float, kept: float) -> tuple[str, Level, str]:
    budget = last.gauges.get("hybrid_quality_budget_tokens", 0)
    if math.isinf(budget):
        return _dense_spell(promised, kept), "good", advice.keepable_promise(last)
    at = f" at {budget:,.0f} tokens of budget" if budget else ""
    kl = last.gauges.get("hybrid_quality_max_kl")
    profiled = f", which kept answers within {kl:g} nats of dense attention's where it was profiled" if kl else ""
    text = f"{_kept(kept)} of the attention mass is kept{at}; promised: {100 * promised:.4g}%{profiled}."
    return text, "good" if kept >= promised else "bad", ""


def _of_samples(last: Reading, layers: Sequence[Layer]) -> tuple[str, Level, str]:
    attended = [layer.attended for layer in layers if layer.attended is not None]
    if attended and min(attended) == 1:
        return "Exact: what decodes now attends every token of its context, in every layer.", "good", ""
    predicted = _predicted(layers)
    masses = {layer.layer: layer.mass_recall for layer in layers if layer.mass_recall is not None}
    if not masses:
        left_out = ""
        if attended:
            left_out = f" {1 - sum(attended) / len(attended):.0%} of the contexts' tokens are left out, but"
        why = f"no layer was sampled meanwhile (metrics.sample_interval says how often).{predicted}"
        return f"Not measured yet:{left_out} {why}", "unknown", ""
    mean, worst = sum(masses.values()) / len(masses), min(masses, key=lambda layer: masses[layer])
    text = f"{mean:.1%} of the attention mass is kept in sampled layers, {masses[worst]:.1%} in the worst ({worst})."
    if mean >= KEPT_WELL:
        return text + predicted, "good", ""
    return text + predicted, "fair" if mean >= KEPT else "bad", advice.more_faithful(last)


def _predicted(layers: Sequence[Layer]) -> str:
    cosines = {layer.layer: layer.query_cosine for layer in layers if layer.query_cosine is not None}
    if not cosines:
        return ""
    least, cosine = min(cosines, key=lambda layer: cosines[layer]), sum(cosines.values()) / len(cosines)
    return f" Cosine of predicted and true queries: {cosine:.2f}, {cosines[least]:.2f} in the worst ({least})."


def _dense_spell(promised: float, kept: float) -> str:
    """Nothing is sampled in it: ``kept`` is what led to it, not what is kept now."""
    return (
        f"Everything is attended just now: the largest budget kept {_kept(kept)} of the attention mass when that was "
        f"last measured, less than the promised {100 * promised:.4g}%. After a while it is tried again."
    )


def _kept(mass: float) -> str:
    """As exact as promises are written, and never more than it is: what is kept may be just below one."""
    return f"{math.floor(round(1e4 * mass, 6)) / 100:g}%"


def _fast(last: Reading, load: _Load, recent: Sequence[Column]) -> Answer:
    def answer(text: str, level: Level) -> Answer:
        return Answer(question="Is it fast?", text=text, level=level)

    rate = _mean(recent, lambda column: column.generated_per_second)
    if rate is None:
        return answer("Not measured yet.", "unknown")
    if not rate:
        reads = f"It reads prompts, {load.prompts:,.0f} tokens/s."
        return answer(reads if load.prompts else "It is idle.", "unknown")
    speed = f"{rate:,.1f} tokens/s{_of_each(rate, last.running)}"
    if last.is_in_place:
        took = "" if load.attention is None else f"; attention takes {load.attention:.0%} of the time"
        return answer(
            f"{speed}{took}. In place nothing is waited for, and nothing here says how fast this machine could be: "
            "hybrid bench throughput compares with the engine alone.",
            "unknown",
        )
    if load.is_held_by_bus:
        return answer(f"{speed}; copies take about {load.bus:.0%} of the time.", "fair")
    if not load.counts_waits:
        return answer(f"{speed}; no wait was counted, by which it could be judged.", "unknown")
    waited = f"the device tier waits {load.waits:.1%} of the time for the CPU"
    return answer(f"{speed}; {waited}.", "good" if load.waits <= WAITS else "fair")


def _of_each(rate: float, running: float | None) -> str:
    if not running:
        return ""
    whose = "the one request" if running == 1 else f"each of {running:,.0f} requests"
    return f", {rate / running:,.1f} of {whose} ({1000 * running / rate:,.0f} ms per token)"


def _limit(last: Reading, load: _Load, layers: Sequence[Layer], budget_may_fall: bool) -> tuple[Answer, str]:
    """And what would move it."""
    text, level, change = _what_holds(last, load, layers, budget_may_fall)
    return Answer(question="What holds it back?", text=text, level=level), change


def _what_holds(last: Reading, load: _Load, layers: Sequence[Layer], budget_may_fall: bool) -> tuple[str, Level, str]:
    if last.waiting and load.fill >= FULL:
        text = f"Host memory: {last.waiting:,.0f} requests wait, the host pool is {load.fill:.0%} full."
        return text, "fair", advice.more_memory(last)
    if load.is_held_by_bus:
        text = (
            f"The bus: copies, {load.copied / 1e6:,.0f} MB/s, take about {load.bus:.0%} of the time; the device tier "
            f"waits {load.waits:.0%} of it for the CPU."
        )
        return text, "fair", advice.less_copying(last, budget_may_fall)
    if load.waits > WAITS:
        ratios = [layer.cpu_ratio for layer in layers if layer.cpu_ratio is not None]
        share = sum(ratios) / len(ratios) if ratios else 0
        waits = f"the device tier waits {load.waits:.0%} of the time"
        text = f"The CPU: {waits}; {share:.0%} of the tokens are attended there."
        return text, "fair", advice.less_waiting(last, budget_may_fall)
    if last.waiting:
        return _waiting(last, load)
    if load.attention:
        takes = f"takes {load.attention:.0%} of the time{_of_contexts(layers)}"
        if load.attention > MOSTLY:
            return f"The CPU's attention: it {takes}.", "fair", advice.less_attention(last, budget_may_fall)
        return f"Not attention, which {takes}: the CPU's matrices, prompts, or too few requests.", "good", ""
    if load.copied and load.bus is None and not load.waits:
        text = (
            f"Not measured: {load.copied / 1e6:,.0f} MB/s are copied to the device tier; how long it waits for them is "
            "not counted. hybrid profile --hardware measures what the bus carries."
        )
        return text, "unknown", ""
    return "Nothing that is measured here: no request waits.", "good", ""


def _waiting(last: Reading, load: _Load) -> tuple[str, Level, str]:
    """Requests wait although the host pool has room."""
    most, fill = advice.most_requests(last), f"the host pool is {load.fill:.0%} full"
    if most is not None and load.most_running < most:
        waits = (
            f"{last.waiting:,.0f} requests wait although only {load.most_running:,.0f} of {most:,.0f} run and {fill}"
        )
        if not load.prompts:
            return f"Not known: {waits}.", "fair", ""
        return f"Prompts, most likely: {waits}; those before them are being read.", "fair", ""
    return f"The batch: {last.waiting:,.0f} requests wait, {fill}.", "fair", advice.larger_batch(last)


def _of_contexts(layers: Sequence[Layer]) -> str:
    attended = [layer.attended for layer in layers if layer.attended is not None]
    return f" for {sum(attended) / len(attended):.0%} of the contexts' tokens" if attended else ""


def _mean(columns: Sequence[Column], of: Callable[[Column], float | None]) -> float | None:
    """Over time."""
    found = [(value, column.seconds) for column in columns if (value := of(column)) is not None]
    seconds = sum(length for _, length in found)
    return sum(value * length for value, length in found) / seconds if seconds else None
