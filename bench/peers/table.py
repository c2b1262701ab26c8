"""Points as a markdown table: every peer's rates, ours over them, and what is lost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

from bench.peers.measure import Point
from hybrid_backend.tools.bench.spread import spread

LONG, LONGER = 4000, 7000  # tokens of context from which we mean to be faster, and by GOAL
GOAL = 1.5
_OURS = ("hybrid-sparse", "hybrid-dense")


def table(points: Sequence[Point], describe: Callable[[str], str]) -> str:
    """One row per depth, batch and peer. Ratios are medians over the rounds, ours over the peer's in the same round."""
    ours = [name for name in _OURS if any(point.peer == name for point in points)]
    head = ["context", "batch", "peer", "", "decode tok/s", *(f"{name} over it" for name in ours), "prefill tok/s"]
    head += [f"{ours[0]} over it"] if ours else []
    lines = [head, ["---"] * len(head)]
    for depth, batch in _places(points):
        here = {point.peer: point for point in points if (point.depth, point.batch) == (depth, batch)}
        for name, point in here.items():
            cells = [f"{depth:,}", str(batch), name, describe(name), spread(point.decode, 1)]
            cells += [_cell(here, mine, name, lambda p: p.decode) for mine in ours]
            cells.append(spread(point.prefill, 1))
            cells += [_cell(here, ours[0], name, lambda p: p.prefill)] if ours else []
            lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def verdict(points: Sequence[Point], equal: Collection[str]) -> str:
    """The goal, and by whom it is missed: decoding at equal precision, from 4k on faster, near 8k and beyond by 1.5."""
    lines = list[str]()
    for depth, batch in _places(points):
        here = {point.peer: point for point in points if (point.depth, point.batch) == (depth, batch)}
        ours = [here[name] for name in _OURS if name in here]
        others = [here[name] for name in here if name in equal and name not in _OURS]
        if not ours or not others:
            continue
        wanted = GOAL if depth >= LONGER else 1.0 if depth >= LONG else 0.0
        best = max(ours, key=lambda point: statistics.median(point.decode))
        ratios = {point.peer: ratio(best.decode, point.decode) for point in others}
        hardest = min(ratios, key=lambda name: ratios[name])
        state = "no goal" if not wanted else f"goal {wanted:g}, {'met' if ratios[hardest] >= wanted else 'MISSED'}"
        lost = ", ".join(f"{name} ({value:.2f})" for name, value in ratios.items() if value < 1)
        line = f"{depth:,} x {batch}: {best.peer} decodes at {ratios[hardest]:.2f} of {hardest} ({state})"
        lines.append(f"- {line}; slower than {lost}" if lost else f"- {line}")
    return "\n".join(lines) + "\n"


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def _places(points: Sequence[Point]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((point.depth, point.batch) for point in points))


def _cell(here: Mapping[str, Point], mine: str, name: str, rates: Callable[[Point], Sequence[float]]) -> str:
    if name in _OURS or mine not in here or not rates(here[name]) or not rates(here[mine]):
        return ""
    value = ratio(rates(here[mine]), rates(here[name]))
    return f"{value:.2f}" if value >= 1 else f"**{value:.2f}, slower**"
