"""The answers at the top of the page: is it faithful, is it fast, what holds it back, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybrid_backend.tools.status.history import WINDOW
from hybrid_backend.tools.status.model import Answer, Column, Layer, Level
from hybrid_backend.tools.status.reading import Reading

KEPT_WELL, KEPT = 0.95, 0.9
"""Of the attention mass: above the first the answer is good, below the second bad, where nothing is promised."""
WAITS = 0.1
"""Share of the time that the device tier waits for CPU workers, above which it is said to be held back by them."""
FULL = 0.9
"""Of the host pool."""
MOSTLY = 0.5
"""Share of the time that attention in place takes, above which it is said to hold a server back."""


def glance(last: Reading, columns: Sequence[Column], layers: Sequence[Layer]) -> tuple[Answer, ...]:
    """In the order in which a user asks. The last one is there only where something should be changed."""
    recent = [column for column in columns if columns[-1].time - column.time < WINDOW]
    faithful, more_budget = _faithful(last, layers)
    limit, change = _limit(last, recent, layers)
    answers = [faithful, _fast(last, recent), limit]
    changes = [text for text in (more_budget, change) if text]
    if changes:
        answers.append(Answer(question="What to change", text="\n".join(changes), level="unknown"))
    return tuple(answers)


def _faithful(last: Reading, layers: Sequence[Layer]) -> tuple[Answer, str]:
    """And what to do about it, perhaps."""

    def answer(text: str, level: Level) -> Answer:
        return Answer(question="Is it faithful?", text=text, level=level)

    promised, kept = last.gauges.get("hybrid_quality_min_mass"), last.gauges.get("hybrid_quality_mass")
    budget = last.gauges.get("hybrid_quality_budget_tokens")
    if promised and kept is not None:
        at = f" at {budget:,.0f} tokens of budget" if budget else ""
        kl = last.gauges.get("hybrid_quality_max_kl")
        profiled = f", which kept answers within {kl:g} nats of dense attention's where it was profiled" if kl else ""
        text = f"{kept:.1%} of the attention mass is kept{at}; promised: {promised:.1%}{profiled}."
        return answer(text, "good" if kept >= promised else "bad"), ""
    attended = [layer.attended for layer in layers if layer.attended is not None]
    if attended and min(attended) == 1:
        return answer("Exact: what decodes now attends every token of its context, in every layer.", "good"), ""
    cosines = {layer.layer: layer.query_cosine for layer in layers if layer.query_cosine is not None}
    predicted = ""
    if cosines:
        least, cosine = min(cosines, key=lambda layer: cosines[layer]), sum(cosines.values()) / len(cosines)
        predicted = f" Cosine of predicted and true queries: {cosine:.2f}, {cosines[least]:.2f} in the worst ({least})."
    masses = {layer.layer: layer.mass_recall for layer in layers if layer.mass_recall is not None}
    if not masses:
        left_out = (
            f": {1 - sum(attended) / len(attended):.0%} of the contexts' tokens are left out, but" if attended else ":"
        )
        return answer(
            f"Not measured yet{left_out} no layer was sampled meanwhile (metrics.sample_interval says how often)."
            + predicted,
            "unknown",
        ), ""
    mean, worst = sum(masses.values()) / len(masses), min(masses, key=lambda layer: masses[layer])
    text = f"{mean:.1%} of the attention mass is kept in sampled layers, {masses[worst]:.1%} in the worst ({worst})."
    text += predicted
    if mean >= KEPT_WELL:
        return answer(text, "good"), ""
    return (
        answer(text, "fair" if mean >= KEPT else "bad"),
        "Faithful: a larger budget_tokens, or quality.min_mass, by which the server finds it.",
    )


def _fast(last: Reading, recent: Sequence[Column]) -> Answer:
    rate, running = _mean(recent, lambda column: column.generated_per_second), last.running
    question = "Is it fast?"
    if rate is None:
        return Answer(question=question, text="Not measured yet.", level="unknown")
    if not rate:
        prompts = _mean(recent, lambda column: column.prompt_per_second) or 0
        text = f"It reads prompts, {prompts:,.0f} tokens/s." if prompts else "It is idle."
        return Answer(question=question, text=text, level="unknown")
    each = f", {1000 * running / rate:,.0f} ms per token of each of {running:,.0f} requests" if running else ""
    waits = _mean(recent, lambda column: column.wait_share) or 0
    waited = "nothing is waited for" if last.is_in_place else f"the device tier waits {waits:.1%} of the time"
    return Answer(
        question=question,
        text=f"{rate:,.1f} tokens/s{each}; {waited}.",
        level="good" if waits <= WAITS else "fair",
    )


# What each engine calls the longest context, and the most requests at once.
_FLAGS = {"vllm": ("--max-model-len", "--max-num-seqs"), "sglang": ("--context-length", "--max-running-requests")}


def _limit(last: Reading, recent: Sequence[Column], layers: Sequence[Layer]) -> tuple[Answer, str]:
    """And what would move it."""
    waits, fill = _mean(recent, lambda column: column.wait_share) or 0, last.pool_fill or 0
    ratios = [layer.cpu_ratio for layer in layers if layer.cpu_ratio is not None]
    share = sum(ratios) / len(ratios) if ratios else 0
    copied = _mean(recent, lambda column: column.copied_bytes_per_second) or 0
    attention = _mean(recent, lambda column: column.attention_share)
    question = "What holds it back?"
    longest, rows = _FLAGS.get(last.engine or "", _FLAGS["vllm"])
    if last.waiting and fill >= FULL:
        text = f"Host memory: {last.waiting:,.0f} requests wait, the host pool is {fill:.0%} full."
        change = f"Memory: a larger host_pool.size, or a smaller {longest}."
    elif waits > WAITS and copied and not share:
        text = f"The bus: the device tier waits {waits:.0%} of the time for copies, {copied / 1e6:,.0f} MB/s."
        change = "Bus: more frames_per_request, a smaller budget_tokens."
    elif waits > WAITS:
        text = f"The CPU: the device tier waits {waits:.0%} of the time; {share:.0%} of the tokens are attended there."
        change = (
            "CPU: more frames_per_request, shorter recall.intervals, a smaller budget_tokens, more workers.threads."
        )
    elif last.waiting:
        text = f"The batch: {last.waiting:,.0f} requests wait, the host pool is {fill:.0%} full."
        change = f"Batch: a larger {rows}."
    elif attention is not None and attention > MOSTLY:
        text = f"The CPU's attention: it takes {attention:.0%} of the time{_of_contexts(layers)}."
        change = "Attention: a smaller budget_tokens, as far as it is faithful enough; more cores."
    elif attention:
        text = (
            f"Not attention, which takes {attention:.0%} of the time{_of_contexts(layers)}: the CPU's matrices, "
            "prompts, or too few requests."
        )
        return Answer(question=question, text=text, level="good"), ""
    else:
        return Answer(question=question, text="Nothing that is measured here: no request waits.", level="good"), ""
    return Answer(question=question, text=text, level="fair"), change


def _of_contexts(layers: Sequence[Layer]) -> str:
    attended = [layer.attended for layer in layers if layer.attended is not None]
    return f" for {sum(attended) / len(attended):.0%} of the contexts' tokens" if attended else ""


def _mean(columns: Sequence[Column], of: Callable[[Column], float | None]) -> float | None:
    """Over time."""
    found = [(value, column.seconds) for column in columns if (value := of(column)) is not None]
    seconds = sum(length for _, length in found)
    return sum(value * length for value, length in found) / seconds if seconds else None
