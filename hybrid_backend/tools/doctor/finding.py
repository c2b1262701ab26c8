"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``fix``: what to do, on one line; only an ok finding may have none.

    ``checked`` is false where the machine did not let us look; such a finding is a warning.
    """

    check: str
    state: State
    found: str
    fix: str = ""
    checked: bool = True

    def __post_init__(self) -> None:
        if self.state != "ok" and not self.fix:
            raise ValueError(f"{self.check}: a {self.state} needs a fix")
        if "\n" in self.found or "\n" in self.fix:
            raise ValueError(f"{self.check}: a finding is one line")


def unknown(check: str, why: object, fix: str) -> Finding:
    """A check that could not be made."""
    reason = " ".join(str(why).split())
    return Finding(check, "warning", f"cannot be checked: {reason}", fix, checked=False)


def has_problem(findings: list[Finding]) -> bool:
    return any(finding.state == "problem" for finding in findings)
