"""Points as a markdown table: every peer's rates, ours over them, and what is lost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from bench.peers.measure import Point
from bench.peers.registry import find
from hybrid_backend.tools.bench.report import spread

LONG, LONGER = 4000, 7000  # tokens of context from which we mean to be faster, and by GOAL
GOAL = 1.5
_RATES: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")


def table(points: Sequence[Point], dtype: str) -> str:
    """Return a markdown table with a row per depth, batch and peer, by groups.

    Ratios are medians over the rounds: the rate of our first peer in the group over the row's, in the same round.
    """
    compared = any(find(point.peer).ours for point in points)
    head = ["context", "batch", "peer", "", "decode tok/s", *(["ours over it"] if compared else []), "prefill tok/s"]
    head += ["ours over it"] if compared else []
    lines = [head, ["---"] * len(head)]
    for depth, batch, group in _places(points):
        here = _at(points, depth, batch, group)
        mine = next((point for point in here if find(point.peer).ours), None)
        for point in here:
            cells = [f"{depth:,}", str(batch), point.peer, find(point.peer).what.format(dtype=dtype)]
            for rates in _RATES:
                cells.append(spread(getattr(point, rates), 1))
                cells += [_cell(mine, point, rates)] if compared else []
            lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def verdict(points: Sequence[Point]) -> str:
    """Name the peers that miss the goal: decoding faster in each group from 4k on, 1.5 times as fast from 8k on."""
    lines = list[str]()
    for depth, batch, group in _places(points):
        here = _at(points, depth, batch, group)
        ours = [point for point in here if find(point.peer).ours]
        others = [point for point in here if not find(point.peer).ours]
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


def _places(points: Sequence[Point]) -> list[tuple[int, int, str]]:
    return list(dict.fromkeys((point.depth, point.batch, find(point.peer).group) for point in points))


def _at(points: Sequence[Point], depth: int, batch: int, group: str) -> list[Point]:
    return [p for p in points if (p.depth, p.batch) == (depth, batch) and find(p.peer).group == group]


def _cell(mine: Point | None, other: Point, rates: Literal["decode", "prefill"]) -> str:
    if mine is None or mine is other or not getattr(mine, rates) or not getattr(other, rates):
        return ""
    value = ratio(getattr(mine, rates), getattr(other, rates))
    return f"{value:.2f}" if value >= 1 else f"**{value:.2f}, slower**"
