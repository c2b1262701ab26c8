"""A markdown table and a plot of a sweep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from hybrid_backend.tools.bench.spread import spread
from hybrid_backend.tools.bench.throughput.point import Point

_HEAD = (
    "rate, req/s", "endpoint", "done req/s", "output tok/s", "of the first", "goodput req/s", "TTFT median s",
    "TTFT p99 s", "TPOT median ms", "TPOT p99 ms", "failed",
)  # fmt: skip


def endpoints_of(points: Sequence[Point]) -> list[str]:
    """In the order in which they were first measured in the first repeat at the first rate."""
    return list(dict.fromkeys(point.endpoint for point in points))


def rates_of(points: Sequence[Point]) -> list[float | None]:
    return sorted(set(p.rate for p in points), key=lambda rate: math.inf if rate is None else rate)


def table(points: Sequence[Point]) -> str:
    """Medians over the repeats, with least..most where there are several. The ratio is of the same repeats' pairs."""
    names = endpoints_of(points)
    lines = [" | ".join(_HEAD), " | ".join("---" for _ in _HEAD)]
    for rate in rates_of(points):
        for name in names:
            mine = _of(points, name, rate)
            cells = [
                "all at once" if rate is None else f"{rate:g}",
                name,
                _spread(mine, lambda p: p.requests_per_second, 2),
                _spread(mine, lambda p: p.output_tokens_per_second, 1),
                _ratio(mine, _of(points, names[0], rate)) if name != names[0] else "1",
                _spread(mine, lambda p: p.good_requests_per_second, 2),
                _spread(mine, lambda p: p.ttft_median / 1e3, 2),
                _spread(mine, lambda p: p.ttft_p99 / 1e3, 2),
                _spread(mine, lambda p: p.tpot_median, 1),
                _spread(mine, lambda p: p.tpot_p99, 1),
                str(sum(p.failed for p in mine)),
            ]
            lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def progress_line(point: Point, repeats: int) -> str:
    """Say in one line what one run measured."""
    rate = "all at once" if point.rate is None else f"{point.rate:g} req/s"
    failed = f", {point.failed} failed" if point.failed else ""
    run = f"{point.endpoint}, {rate}, run {point.repeat + 1} of {repeats}"
    times = f"TTFT {point.ttft_median / 1e3:.2f} s, TPOT {point.tpot_median:.1f} ms"
    return f"{run}: {point.output_tokens_per_second:.1f} tokens/s, {times}{failed}"


def summary(points: Sequence[Point]) -> Table:
    """Build the table for the screen: medians only, so that it fits 80 columns. `table` has the ranges."""
    columns: list[tuple[str, Callable[[Point], float], int]] = [
        ("req/s done", lambda p: p.requests_per_second, 2),
        ("tokens /s", lambda p: p.output_tokens_per_second, 1),
        ("good req/s", lambda p: p.good_requests_per_second, 2),
        ("TTFT s", lambda p: p.ttft_median / 1e3, 2),
        ("p99", lambda p: p.ttft_p99 / 1e3, 2),
        ("TPOT ms", lambda p: p.tpot_median, 1),
        ("p99", lambda p: p.tpot_p99, 1),
    ]
    names = endpoints_of(points)
    screen = Table("rate", "endpoint", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption="medians over the repeats")
    for label in [label for label, _, _ in columns] + ["failed", f"/ {names[0]}"]:
        screen.add_column(label, justify="right")
    for rate in rates_of(points):
        for name in names:
            measured, first = _of(points, name, rate), _of(points, names[0], rate)
            cells = [f"{statistics.median(map(value, measured)):.{digits}f}" for _, value, digits in columns]
            ratio = _ratio(measured, first).partition(" ")[0]
            rate_cell = "all" if rate is None else f"{rate:g}"
            screen.add_row(rate_cell, name, *cells, str(sum(p.failed for p in measured)), ratio)
    return screen


def plot(points: Sequence[Point], title: str, path: Path) -> None:
    """Throughput, goodput, TTFT and TPOT by request rate, medians with the range over the repeats."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    panels: list[tuple[str, Callable[[Point], float], bool]] = [
        ("output tokens/s", lambda p: p.output_tokens_per_second, False),
        ("goodput, requests/s", lambda p: p.good_requests_per_second, False),
        ("time to first token, median, s", lambda p: p.ttft_median / 1e3, True),
        ("time per output token, median, ms", lambda p: p.tpot_median, False),
    ]
    rates = rates_of(points)
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, (label, value, logarithmic) in zip(axes.flat, panels, strict=True):
        for name, marker in zip(endpoints_of(points), "os^Dv*" * len(points), strict=False):
            groups = [[value(p) for p in _of(points, name, rate)] for rate in rates]
            middle = [statistics.median(group) for group in groups]
            below = [m - min(g) for m, g in zip(middle, groups, strict=True)]
            above = [max(g) - m for m, g in zip(middle, groups, strict=True)]
            axis.errorbar(range(len(rates)), middle, [below, above], marker=marker, capsize=3, label=name)
        axis.set_xticks(range(len(rates)), ["all at once" if rate is None else f"{rate:g}" for rate in rates])
        axis.set_xlabel("request rate, 1/s")
        axis.set_title(label, fontsize=11)
        if logarithmic:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)


def _of(points: Sequence[Point], name: str, rate: float | None) -> list[Point]:
    return sorted((p for p in points if p.endpoint == name and p.rate == rate), key=lambda p: p.repeat)


def _spread(points: Sequence[Point], value: Callable[[Point], float], digits: int) -> str:
    return spread([value(point) for point in points], digits)


def _ratio(mine: Sequence[Point], first: Sequence[Point]) -> str:
    pairs = zip(mine, first, strict=True)
    return spread([a.output_tokens_per_second / b.output_tokens_per_second for a, b in pairs], 2)
