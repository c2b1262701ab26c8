"""What every pool of CPU workers offers: jobs are submitted, answers are waited for by ticket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial


class Owners(NamedTuple):
    """Whose jobs they are: row r is dropped once ``current[requests[r]] != generations[r]``. All int64."""

    requests: Tensor  # [rows]
    generations: Tensor  # [rows]
    current: Tensor  # [requests]


class Ticket(Protocol):
    """A submitted set of jobs. ``asked``: when (`time.perf_counter`)."""

    asked: float

    def wait(self, deadline: float) -> Partial:
        """The partial ``[rows, heads, head_dim]``.

        Raises:
            DeadlineError: the workers did not answer within ``deadline`` seconds; names the job, which is abandoned.
            WorkerError: a worker failed; says why. Or the jobs were abandoned before.
        """

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once. Asking drops nothing and never blocks."""

    def abandon(self) -> None:
        """Forget the jobs: those not begun are dropped, a running one ends into memory that nobody reads."""


class WorkerPool(ABC):
    """Threads, pinned away from the engine's compute cores, that run one partial-attention kernel.

    A job owns its output, so a job of a request that is gone can never write into another request's result.
    """

    cpus: list[int]
    threads: int

    @abstractmethod
    def submit(
        self, q: Tensor, layer: Tensor, pages: PageList, scale: float, what: str, owners: Owners | None = None
    ) -> Ticket:
        """Start the jobs of one layer and return at once. ``q`` ``[rows, heads, head_dim]`` must not change."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads."""
