"""The process of one case: ``python -m bench.gpu_session.case JOURNAL LOGS CASE``. Its parent is `runner`."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from bench.gpu_session.journal import Case, Journal, last_lines
from hybrid_backend.tools.bench.servers import interruptible


class Context:
    """What a part's ``measure`` gets beside its options: a folder of its own for servers' logs, and the journal."""

    def __init__(self, case: Case, journal: Journal, logs: Path) -> None:
        self.case = case
        self.logs = logs / case.name
        self._journal = journal

    def emit(self, **figures: Any) -> None:
        """Write figures into the journal at once."""
        self._journal.append("result", self.case, figures=figures)
        print(f"{self.case.name}: {figures}", flush=True)


def main() -> None:
    journal, logs, line = Journal(Path(sys.argv[1])), Path(sys.argv[2]), json.loads(sys.argv[3])
    case = Case(line["part"], line["case"], line["options"], 0, 0)
    part = importlib.import_module(f"bench.gpu_session.{case.part}")
    context = Context(case, journal, logs)
    try:
        with interruptible():
            part.measure(case.options, context)
    except BaseException as error:  # The reason is often in a server's log, whatever has ended the case.
        traceback.print_exc()
        for log in sorted(context.logs.rglob("*.log"), key=lambda log: log.stat().st_mtime)[-1:]:
            print(f"-- the end of {log}:", *last_lines(log, 20), sep="\n", file=sys.stderr, flush=True)
        sys.exit(f"{type(error).__name__}: {error}".removesuffix(": "))


if __name__ == "__main__":
    main()
