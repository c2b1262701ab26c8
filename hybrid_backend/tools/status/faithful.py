"""The answer to "Is it faithful?": how near attention is to dense attention, by promise, by samples or exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybrid_backend.tools.status import advice
from hybrid_backend.tools.status.model import Answer, Change, Layer, Level
from hybrid_backend.tools.status.reading import Reading
from hybrid_backend.tools.status.words import mass, mean

GOOD_MASS, FAIR_MASS = advice.MIN_MASS, 0.9
"""Attention mass from which the answer is good, and below which it is bad, where nothing is promised."""
_VERDICTS: dict[Level, str] = {"good": "Faithful", "fair": "Nearly faithful", "bad": "Not faithful"}


def faithful(last: Reading, layers: Sequence[Layer]) -> tuple[Answer, Change | None]:
    """Judge faithfulness, and propose a change where too little of the attention mass is kept."""
    promised, measured = last.gauges.get("hybrid_quality_min_mass"), last.gauges.get("hybrid_quality_mass")
    if promised and measured is not None:
        return _by_promise(last, promised, measured)
    return _by_samples(last, layers)


def _answer(verdict: str, text: str, level: Level) -> Answer:
    return Answer(question="Is it faithful?", verdict=verdict, text=text, level=level)


def _by_promise(last: Reading, promised: float, measured: float) -> tuple[Answer, Change | None]:
    budget = last.gauges.get("hybrid_quality_budget_tokens", 0)
    if math.isinf(budget):
        text = (  # nothing is sampled in such a spell: the mass is the one that led to it
            f"The largest budget kept {mass(measured)} of the attention mass when that was last measured, less than "
            f"the promised {100 * promised:.4g}%. So every token is attended; after a while the budget is tried again."
        )
        return _answer("Everything attended", text, "good"), advice.keepable_promise(last)
    of_budget = f" at {budget:,.0f} tokens of budget" if budget else ""
    kl = last.gauges.get("hybrid_quality_max_kl")
    profiled = f", which kept answers within {kl:g} nats of dense attention's where it was profiled" if kl else ""
    text = f"{mass(measured)} of the attention mass is kept{of_budget}; promised: {100 * promised:.4g}%{profiled}."
    is_kept = measured >= promised
    return _answer("Promise kept" if is_kept else "Promise broken", text, "good" if is_kept else "bad"), None


def _by_samples(last: Reading, layers: Sequence[Layer]) -> tuple[Answer, Change | None]:
    attended = [layer.attended for layer in layers if layer.attended is not None]
    if attended and min(attended) == 1:
        return _answer("Exact", "What decodes attends every token of its context, in every layer.", "good"), None
    masses = {layer.layer: layer.mass_recall for layer in layers if layer.mass_recall is not None}
    average = mean(masses.values())
    if average is None:
        left_out = (
            f"{1 - sum(attended) / len(attended):.0%} of the contexts' tokens are left out, and " if attended else ""
        )
        text = f"{left_out}no layer was sampled yet (metrics.sample_interval says how often).{_cosines(layers)}"
        return _answer("Not measured", text[:1].upper() + text[1:], "unknown"), None
    worst = min(masses, key=lambda layer: masses[layer])
    text = (
        f"{average:.1%} of the attention mass is kept in sampled layers, {masses[worst]:.1%} in the worst ({worst}), "
        f"means since start.{_cosines(layers)}"
    )
    level: Level = "good" if average >= GOOD_MASS else "fair" if average >= FAIR_MASS else "bad"
    return _answer(_VERDICTS[level], text, level), None if level == "good" else advice.more_faithful(last)


def _cosines(layers: Sequence[Layer]) -> str:
    cosines = {layer.layer: layer.query_cosine for layer in layers if layer.query_cosine is not None}
    average = mean(cosines.values())
    if average is None:
        return ""
    worst = min(cosines, key=lambda layer: cosines[layer])
    return f" Cosine of predicted and true queries: {average:.2f}, {cosines[worst]:.2f} in the worst ({worst})."
