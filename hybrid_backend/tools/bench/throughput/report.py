"""The tables and the plot of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from hybrid_backend.tools.bench.report import Figures, Row, comparison, draw_lines, markdown_table
from hybrid_backend.tools.bench.throughput.sweep import Point

ROWS = (
    Row("done req/s", "requests_per_second", 2),
    Row("output tok/s", "output_tokens_per_second", 1),
    Row("of the first", "times_first", 2),
    Row("goodput req/s", "good_requests_per_second", 2),
    Row("TTFT median s", "ttft_median", 2, 1e-3),
    Row("TTFT p99 s", "ttft_p99", 2, 1e-3),
    Row("TPOT median ms", "tpot_median", 1),
    Row("TPOT p99 ms", "tpot_p99", 1),
    Row("failed", "failed"),
)
_PANELS = ("output_tokens_per_second", "good_requests_per_second", "ttft_median", "tpot_median")


def table(points: Sequence[Point]) -> str:
    """Return the markdown table: medians over the repeats, with their ranges; each ratio is of two runs of one turn."""
    rows = [
        [rate, endpoint, *(row.cell(figures) for row in ROWS)]
        for rate, endpoints in _sections(points).items()
        for endpoint, figures in endpoints.items()
    ]
    return markdown_table(["rate, req/s", "endpoint", *(row.label for row in ROWS)], rows)


def screen_table(points: Sequence[Point]) -> Table:
    """Return the same table with a column per endpoint, which fits 80 columns."""
    sections = {f"{rate} req/s" if rate[0].isdigit() else rate: rows for rate, rows in _sections(points).items()}
    return comparison("", sections, ROWS)


def progress_line(point: Point, repeats: int) -> str:
    """Summarize one run in a line."""
    rate = _rate_label(point.rate) + (" req/s" if point.rate is not None else "")
    failed = f", {point.failed} failed" if point.failed else ""
    run = f"{point.endpoint}, {rate}, run {point.repeat + 1} of {repeats}"
    times = f"TTFT {point.ttft_median / 1e3:.2f} s, TPOT {point.tpot_median:.1f} ms"
    return f"{run}: {point.output_tokens_per_second:.1f} tokens/s, {times}{failed}"


def plot(points: Sequence[Point], title: str, path: Path) -> None:
    """Draw throughput, goodput, TTFT and TPOT by request rate: medians with the ranges over the repeats."""
    # pyplot would need a display and keep the figure.
    from matplotlib.figure import Figure

    sections = _sections(points)
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, row in zip(axes.flat, (row for row in ROWS if row.key in _PANELS), strict=True):
        lines = {}
        for endpoint in next(iter(sections.values())):
            values = [np.array(figures[endpoint][row.key]) * row.scale for figures in sections.values()]
            lines[endpoint] = np.array([[i, np.median(v), v.min(), v.max()] for i, v in enumerate(values)])
        draw_lines(axis, lines, dict(enumerate(sections)), "request rate, 1/s")
        axis.set_title(row.label, fontsize=11)
        if row.key == "ttft_median":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    axes.flat[0].legend()
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)


def _rate_label(rate: float | None) -> str:
    return "all at once" if rate is None else f"{rate:g}"


def _sections(points: Sequence[Point]) -> dict[str, dict[str, Figures]]:
    """Return the figures by rate, ascending, and endpoint; the first endpoint is the one to compare with."""
    first = {(point.rate, point.repeat): point for point in points if point.endpoint == points[0].endpoint}
    sections: dict[str, dict[str, dict[str, list[float]]]] = {}
    for point in sorted(points, key=lambda point: math.inf if point.rate is None else point.rate):
        reference = first[point.rate, point.repeat].output_tokens_per_second
        values = {**point.model_dump(), "times_first": point.output_tokens_per_second / reference}
        figures = sections.setdefault(_rate_label(point.rate), {}).setdefault(point.endpoint, {})
        for row in ROWS:
            figures.setdefault(row.key, []).append(values[row.key])
    for endpoints in sections.values():
        for figures in endpoints.values():
            figures["failed"] = [sum(figures["failed"])]
    return {rate: dict(endpoints) for rate, endpoints in sections.items()}
