"""A recipe's commands are accepted, and its plan is what `hybrid plan` says today."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_backend.kernels import cpu
from tests.support.recipes import PAGES, ROOT, commands, plans, served, written


@pytest.mark.skipif(bool(cpu.why_unavailable()), reason="the plans are of a machine with native kernels")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_plans_are_todays(path: Path) -> None:
    page = path.read_text()
    assert plans(page) == len(commands(page, "plan")) > 0
    assert written(page) == page, "run `make pages`"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_is_planned_can_be_served(path: Path) -> None:
    """As far as it can be told without an engine: the configuration is accepted and has the method of the plan."""
    page = path.read_text()
    assert len(commands(page, "serve")) >= plans(page)
    for words in commands(page, "serve"):
        _, name, config, flags = served(words)
        assert name == words[1]
        assert f"--set=method={config.method}" in words or not any(word.startswith("--set=method") for word in words)
        assert flags == (words[words.index("--") + 1 :] if "--" in words else [])


def test_every_recipe_is_in_the_list() -> None:
    listed = (ROOT / "recipes" / "README.md").read_text()
    assert [path.name for path in PAGES if f"]({path.name})" not in listed] == []
