"""Tables and plots that compare endpoints or methods, shared by the benches."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

Figures = Mapping[str, Sequence[float]]
"""Values of one endpoint by the figure's key, one value per run."""


@dataclass(frozen=True)
class Row:
    """A figure as tables show it: the values of ``key`` times ``scale``, with ``digits`` decimals."""

    label: str
    key: str
    digits: int = 0
    scale: float = 1.0

    def cell(self, figures: Figures) -> str:
        """Write one endpoint's values."""
        return spread([value * self.scale for value in figures.get(self.key, ())], self.digits)


def spread(values: Sequence[float], digits: int) -> str:
    """Write the median, followed by ``(least..most)`` where these differ; an empty text without values."""
    if not values:
        return ""
    median, least, most = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return median if least == most else f"{median} ({least}..{most})"


def comparison(title: str, sections: Mapping[str, Mapping[str, Figures]], rows: Sequence[Row]) -> Table:
    """Return a table for the screen with a column per endpoint, which wraps cells instead of cutting them.

    ``sections`` has the figures by heading and endpoint; an empty heading is left out.
    """
    table = Table("", title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for endpoint in next(iter(sections.values())):
        table.add_column(endpoint, justify="right", overflow="fold")
    for heading, endpoints in sections.items():
        if heading:
            table.add_row(heading, style="bold")
        for row in rows:
            table.add_row(row.label, *map(row.cell, endpoints.values()))
        table.add_section()
    return table


def markdown_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a markdown table, with an empty line after it."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines) + "\n"


def draw_lines(axis: Any, lines: Mapping[str, np.ndarray], ticks: Mapping[float, str], x_label: str) -> None:
    """Draw lines with error bars on a matplotlib axis.

    ``lines`` has by label an array ``(points, 4)`` of x, y, low and high; ``ticks`` has labels of the x axis by x.
    """
    for (label, points), marker in zip(lines.items(), cycle("os^Dv*"), strict=False):
        x, y, low, high = points.T
        axis.errorbar(x, y, np.stack([y - low, high - y]), marker=marker, capsize=3, label=label)
    axis.set_xticks(list(ticks), list(ticks.values()))
    axis.set_xlabel(x_label)
    axis.grid(alpha=0.3)
