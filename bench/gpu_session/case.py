"""The process of one case: ``python -m bench.gpu_session.case JOURNAL LOGS CASE``. Its parent is `runner`."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.gpu_session.journal import Case, Journal
from hybrid_backend.tools.bench.client import BenchError
from hybrid_backend.tools.bench.servers import interruptible


class Context:
    """What a part's ``measure`` gets beside its options: a place for logs, and the journal."""

    def __init__(self, case: Case, journal: Journal, logs: Path) -> None:
        self.case = case
        self.logs = logs
        self._journal = journal

    def emit(self, **figures: Any) -> None:
        """Write figures into the journal at once."""
        self._journal.append("result", self.case, figures=figures)
        print(f"{self.case.name}: {figures}", flush=True)


def main() -> None:
    journal, logs, line = Journal(Path(sys.argv[1])), Path(sys.argv[2]), json.loads(sys.argv[3])
    case = Case(line["part"], line["case"], line["options"], 0, 0)
    part = importlib.import_module(f"bench.gpu_session.{case.part}")
    try:
        with interruptible():
            part.measure(case.options, Context(case, journal, logs))
    except BenchError as error:
        if (log := re.search(r"its (?:log|output): (\S+)$", str(error))) is not None:
            print("\n".join(Path(log[1]).read_text(errors="replace").splitlines()[-40:]), flush=True)
        raise


if __name__ == "__main__":
    main()
