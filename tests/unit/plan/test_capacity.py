"""The table of capacity in docs/lab/methods.md (`make capacity`)."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from bench import capacity

pytestmark = pytest.mark.slow

TEXT = (Path(__file__).parents[3] / "docs" / "lab" / "methods.md").read_text()


def test_the_documentation_has_todays_table() -> None:
    for row in capacity.rows():
        cells = " | ".join(astuple(row)[1:])
        assert f"`{row.method}` | {cells} |" in TEXT or f"| stock | {cells} |" in TEXT, row


def test_what_is_exact_says_so_and_holds_more_only_on_the_host() -> None:
    rows = capacity.rows()
    stock, last = rows[0], rows[-1]
    assert [row.method for row in rows[1:] if row.exact == "always"] == ["dense", "headinfer", "apex"]
    here = int(stock.requests.split()[0])
    dense = next(row for row in rows if row.method == "dense")
    assert last.requests.startswith(f"{here} + ")
    assert here + int(last.requests.split()[2]) < int(dense.requests.split()[0]), (
        "the CPU's time, not the host's memory"
    )
