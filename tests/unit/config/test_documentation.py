"""docs/reference/configuration.md lists every key, its default, range, meaning and source."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from hybrid_backend.config import (
    Rule,
    config_from_mapping,
    iter_keys,
    load_config,
)
from tests.unit.config.refused import refusal

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"


def documented_row(key, field) -> str:
    meaning, _, source = " ".join(field.description.split()).partition(" Source: ")
    default = json.dumps(field.default) if not isinstance(field.default, str) else field.default
    default = "[]" if field.default == () else default
    cells = [
        f"`{key}`",
        f"`{default}`",
        next(item for item in field.metadata if isinstance(item, Rule)).allowed.replace("*", r"\*"),
        meaning,
        source.rstrip("."),
    ]
    return "| " + " | ".join(cells) + " |"


def test_the_documentation_lists_every_key_default_range_meaning_and_source():
    expected = [documented_row(key, field) for key, field in iter_keys()]
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == expected, "docs/reference/configuration.md should hold:\n" + "\n".join(expected)


def test_every_key_says_what_it_means_and_where_its_default_comes_from():
    for key, field in iter_keys():
        assert field.description and " Source: " in " ".join(field.description.split()), key


def test_the_examples_in_the_documentation_are_valid():
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        config_from_mapping(yaml.safe_load(block), "docs/reference/configuration.md")


@pytest.mark.parametrize(
    "text",
    [
        "page_size: 48",
        "recall: {intervalls: 4}",
        "budget_tokens: 2050",
        "a: 1\nb: 1\nc: 1\nd: 1\ne: 1\nsinks: 1\nsinks: 2",
        "page_size: 48\nsinks: -1\nrecent: 0",
    ],
)
def test_the_documented_error_lines_are_the_real_ones(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text)
    assert f"    {refusal(load_config, 'my.yaml')}\n" in DOCS.read_text()
