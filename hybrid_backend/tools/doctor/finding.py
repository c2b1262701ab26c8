"""Result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        check: name of the check.
        state: a problem keeps a server from starting; a warning makes it slower or less sure.
        text: what the check saw, in one line.
        fix: what to do, in one line. Only an ok finding may have none.
    """

    check: str
    state: State
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.state != "ok" and not self.fix:
            raise ValueError(f"{self.check}: a {self.state} needs a fix")
        if "\n" in self.text or "\n" in self.fix:
            raise ValueError(f"{self.check}: a finding is one line")


def unknown(check: str, why: object, fix: str) -> Finding:
    """Return the finding of a check that could not be made."""
    return Finding(check, "warning", f"cannot be checked: {' '.join(str(why).split())}", fix)
