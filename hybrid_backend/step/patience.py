"""Longest wait of a step for the CPU workers."""

from __future__ import annotations

AFTER_MISS_SECONDS = 2.0
"""Longest wait after a missed deadline. Workers that live answer within milliseconds."""


class Patience:
    """Longest wait of a step for the CPU workers: the deadline, and less after a miss, until the workers answer again.

    If the workers are dead, the engine would otherwise stand still for a whole deadline in every step.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self.is_short = False
        """The workers have missed a deadline and not answered since."""

    @property
    def seconds(self) -> float:
        """Longest wait of the next step, in seconds."""
        return min(AFTER_MISS_SECONDS, self._deadline_seconds) if self.is_short else self._deadline_seconds

    def note(self, *, is_missed: bool) -> None:
        """Note that a wait missed its deadline, or that the workers answered in time."""
        self.is_short = is_missed
