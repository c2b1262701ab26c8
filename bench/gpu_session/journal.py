"""The journal of a session: a file of JSON lines, written as results come, from which a later start goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DONE, FAILED, LATE, STOPPED = "done", "failed", "late", "stopped"
"""How a case ended: by itself, with an error, at its time limit, or because the session was stopped."""
WIDTH = 300


@dataclass(frozen=True)
class Case:
    """One measurement in a process of its own.

    Attributes:
        part: the module of this package that measures it.
        name: unique in a session.
        options: of the measurement; JSON values. Together with the name they say whether a case was done before.
        needs: seconds without which it is not begun.
        most: seconds after which it is stopped.
    """

    part: str
    name: str
    options: Mapping[str, Any]
    needs: float
    most: float

    @property
    def identity(self) -> dict[str, Any]:
        """What a line of the journal says of the case."""
        return {"part": self.part, "case": self.name, "options": json.loads(json.dumps(self.options))}


class Journal:
    """Lines of ``path``; several processes append to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, case: Case | None = None, **fields: Any) -> None:
        """Append one line and wait until it is on the disk."""
        identity = {} if case is None else case.identity
        line = {"event": event, "at": datetime.now(UTC).isoformat(timespec="seconds"), **identity, **fields}
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # A process was killed while it wrote.
                    file.write(b"\n")
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield all lines that are whole."""
        if not self.path.exists():
            return
        for text in self.path.read_text(errors="replace").splitlines():
            try:
                yield json.loads(text)
            except ValueError:
                continue

    def ends(self, case: Case) -> list[str]:
        """Return how each try at the case ended."""
        ends = (line for line in self.lines() if line["event"] == "end")
        return [line["status"] for line in ends if case.identity.items() <= line.items()]


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not empty, each cut after `WIDTH` characters."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return [line[:WIDTH] for line in lines[-count:]]
