"""Generator of docs/reference/cli.md, from the help texts of the command `hybrid`.

    python -m bench.cli_page docs/reference/cli.md        # or: make pages

No engine is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer.cli
from typer.testing import CliRunner

_HEAD = """\
# The command `hybrid`

Written by `make pages` from the texts that `hybrid COMMAND --help` shows; do not edit it, a test compares.
More about a command: [plan](plan.md), [profile](../lab/profile.md), [doctor](doctor.md),
[top](../guides/status-page.md), [serve](vllm.md), [bench throughput](../lab/throughput.md),
[bench accuracy](../lab/accuracy.md).
"""


def page() -> str:
    """Return the text of the page."""
    command = ["hybrid_backend.cli", "utils", "docs", "--name", "hybrid", "--title", "TITLE"]
    text = CliRunner().invoke(typer.cli.app, command, catch_exceptions=False).stdout
    return _HEAD + text.removeprefix("# TITLE\n")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
