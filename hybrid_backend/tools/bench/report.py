"""The table that compares servers: a column for each, figures of several runs as median and range."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

Figures = Mapping[str, Sequence[float]]
"""Values of one endpoint by the figure's key, one value per run."""


@dataclass(frozen=True)
class Row:
    """A figure as the table shows it: the values of ``key`` times ``scale``, with ``digits`` decimals."""

    label: str
    key: str
    digits: int = 0
    scale: float = 1.0

    def cell(self, figures: Figures) -> str:
        """Write the measured values of one endpoint."""
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
