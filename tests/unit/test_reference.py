"""The pages of docs/ that list what the code has are complete and of today; those that explain an idea are short."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from bench import cli_page
from hybrid_backend.observe import metrics
from hybrid_backend.observe.stats import LayerStats, Stats

DOCS = Path(__file__).parents[2] / "docs"
IDEAS = ("digests", "lookahead", "merge", "recall", "step", "exactness", "glossary")


def published() -> dict[str, tuple[str, str]]:
    """Publish one of everything, and return type and labels of all samples by name."""
    stats = Stats([LayerStats(**{field.name: 1 for field in fields(LayerStats)})], Counter({("gpu", "overlap"): 1}))
    registry = CollectorRegistry()
    metrics.Publisher(stats, lambda: dict.fromkeys(metrics._POOL_GAUGES, 1.0), 0, registry).publish()
    return {
        sample.name: (family.type, ", ".join(sorted(sample.labels, key=["rank", "layer", "strategy", "wanted"].index)))
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_every_published_metric_has_its_row() -> None:
    text = (DOCS / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(hybrid_\w+)` \| (\w+) \| ([\w, ]+) \| (.+) \| (.+) \|$", text, re.M)
    assert {name: (kind, labels) for name, kind, labels, _, _ in rows} == published()
    assert len(rows) == len(published()), "a metric has two rows"


def test_the_page_of_the_command_is_todays() -> None:
    assert (DOCS / "reference" / "cli.md").read_text() == cli_page.page(), "run `make pages`"


def words(text: str) -> int:
    """Number of words outside of code blocks, pictures and the marks of tables."""
    text = re.sub(r"```[^`]*```|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)|^ {4}.*$", " ", text, flags=re.M)
    return len(re.findall(r"\w[\w'.-]*", text))


@pytest.mark.parametrize(("page", "most"), [*((page, 500) for page in (*IDEAS, "arrivals")), ("methods", 1500)])
def test_a_page_on_an_idea_is_short(page: str, most: int) -> None:
    assert words((DOCS / "how" / f"{page}.md").read_text()) <= most


@pytest.mark.parametrize("page", sorted(path.name for path in (DOCS / "how").glob("*.md")))
def test_the_files_that_a_page_names_exist(page: str) -> None:
    root = DOCS.parent
    for name in re.findall(
        r"`((?:hybrid_backend|kernels|tests|configs|bench)/[\w/.]+)`", (DOCS / "how" / page).read_text()
    ):
        assert (root / name).exists(), name


@pytest.mark.parametrize("page", IDEAS[:-1])
def test_a_page_on_an_idea_has_its_picture(page: str) -> None:
    pictures = re.findall(r"!\[[^\]]+\]\((\.\./img/how/\w+\.svg)\)", (DOCS / "how" / f"{page}.md").read_text())
    assert pictures and all((DOCS / "how" / picture).is_file() for picture in pictures)
