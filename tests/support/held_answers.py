"""CPU workers' answers to requests that wait (`execution.questions`): late or failed on purpose, or always in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybrid_backend.errors import WorkerError
from hybrid_backend.methods.apex.questions import PoolQuestions
from hybrid_backend.workers import Ticket


class Held:
    """From now on, of requests (`FramePool.index`) that ``holds`` or ``broken`` names, no answer is there, or an error.
    Whoever waits inside a layer waits for the real one all the same."""

    def __init__(self, questions: PoolQuestions) -> None:
        self.holds: set[int] = set()
        self.broken: set[int] = set()
        self._submit = questions._workers.submit
        questions._workers.submit = self.submit  # type: ignore[method-assign]

    def submit(self, q: Any, layer: Any, pages: Any, scale: float, what: str, owners: Any = None) -> Ticket:
        ticket = self._submit(q, layer, pages, scale, what, owners)
        request = int(owners.requests[0])
        mine, waits, abandons = self, ticket.wait, ticket.abandon

        class Late:
            submit_time = ticket.submit_time

            def done(self) -> bool:
                return request in mine.broken or (request not in mine.holds and ticket.done())

            def wait(self, deadline: float) -> Any:
                if request in mine.broken:
                    raise WorkerError("broken on purpose")
                return waits(deadline)

            def abandon(self) -> None:
                abandons()

        return Late()


@contextmanager
def settled(questions: PoolQuestions, held: Held | None = None) -> Iterator[None]:
    """Every answer is there when it is looked for, but for held ones: the steps can be counted."""
    has_arrived = questions.has_arrived

    def patient(request: int, ticket: Ticket) -> bool:
        return held is None or request not in held.holds

    questions.has_arrived = patient  # type: ignore[method-assign]
    try:
        yield
    finally:
        questions.has_arrived = has_arrived  # type: ignore[method-assign]
