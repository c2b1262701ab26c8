"""The recipes' plans: the commands of recipes/*.md, run as a user would, without a model hub.

python -m tests.support.recipes        # writes the plans into the pages again; or: make pages
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.kernels import cpu

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "recipes").glob("*.md") if path.name != "README.md")
_PLAN = re.compile(
    r"^    (?P<command>hybrid plan [^\n]*)\n\n<!-- plan, written by make pages -->\n.*?<!-- end of plan -->$",
    re.M | re.S,
)


def commands(page: str, name: str) -> list[list[str]]:
    """The words of every ``hybrid NAME`` line of a page."""
    whole = re.sub(r"\\\n\s+", "", page)
    return [shlex.split(line)[1:] for line in re.findall(rf"^    (hybrid {name} .*)$", whole, re.M)]


def plans(page: str) -> int:
    return len(_PLAN.findall(page))


def written(page: str) -> str:
    """The page with the plans that its commands give now."""
    return _PLAN.sub(
        lambda found: (
            f"    {found['command']}\n\n<!-- plan, written by make pages -->\n"
            f"{_as_markdown(_run(shlex.split(found['command'])[1:]))}<!-- end of plan -->"
        ),
        page,
    )


def served(words: Sequence[str]) -> list[Any]:
    """What an engine would get of a ``hybrid serve`` command: model, name, configuration, flags."""
    got: list[Any] = []
    engine = SimpleNamespace(
        NAME="an engine",
        check_installation=lambda: None,
        take_address=lambda _: nullcontext(),
        run=lambda *args: got.extend(args[:4]),
    )
    is_another_machine = patch("hybrid_backend.cli.check_available", lambda key, size: None)  # with more memory
    with is_another_machine, patch("hybrid_backend.cli.resolve_server", lambda _: engine):
        _run(words)
    return got


def _run(words: Sequence[str]) -> str:
    """In the repository's root, from where recipes name their files."""
    with (
        patch("hybrid_backend.tools.plan.model._local_folder", lambda _: None),  # published shapes, whatever is fetched
        patch("hybrid_backend.tools.hub.resolve_model", lambda model: model),
        patch("hybrid_backend.tools.hub.check_hub", lambda model: None),
        patch("hybrid_backend.engines.cpu_defaults.has_bf16", lambda: True),  # whatever machine writes the pages
        chdir(ROOT),
    ):
        result = CliRunner(env={"COLUMNS": "80", "HYBRID_CONFIG": None}).invoke(app, list(words))
    assert result.exit_code == 0, f"hybrid {shlex.join(words)}: {result.output}"
    return result.output


def _as_markdown(plan: str) -> str:
    """What `hybrid plan` prints, as a block of code."""
    return "\n" + "".join(f"    {line.rstrip()}\n" if line.strip() else "\n" for line in plan.splitlines()) + "\n"


if __name__ == "__main__":
    if missing := cpu.why_unavailable():
        raise SystemExit(f"error: the plans are of a machine with native kernels: {missing}")
    for path in PAGES:
        path.write_text(written(path.read_text()))
