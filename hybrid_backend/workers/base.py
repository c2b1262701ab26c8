"""Interface of a pool of CPU workers: `WorkerPool.submit` starts jobs and returns a `Ticket` to wait for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial
from hybrid_backend.kernels.operations import PromptToJudge
from hybrid_backend.workers.judging import Judging


class Owners(NamedTuple):
    """The requests that the rows of a job belong to, so that rows of released requests are skipped.

    Row r is skipped once ``current[requests[r]] != generations[r]``, because a release increments the generation.
    """

    requests: Tensor  # [rows] int64 index of each row's request
    generations: Tensor  # [rows] int64 generation of each row's request when the job was submitted
    current: Tensor  # [requests] int64 generation of each request, incremented when the request is released


class Ticket(Protocol):
    """A handle on submitted jobs."""

    submit_time: float  # when the jobs were submitted, in seconds of `time.perf_counter`

    def wait(self, deadline: float) -> Partial:
        """Wait for the jobs and return the partial of all rows, ``[rows, heads, head_dim]``.

        Args:
            deadline: longest wait in seconds.

        Raises:
            DeadlineError: the workers did not finish before the deadline; the message names the jobs. The jobs are
                abandoned.
            WorkerError: a worker failed, or the jobs were abandoned before.
        """

    def done(self) -> bool:
        """Tell whether `wait` would return or raise without waiting."""

    def abandon(self) -> None:
        """Give up the jobs: pending jobs are dropped, and the result of a running job is discarded."""


class WorkerPool(ABC):
    """A pool of threads, pinned to CPUs that the engine does not compute on, which runs a partial-attention kernel.

    Each job has its own output buffer, so a job of a released request never writes into another request's result.
    """

    cpus: list[int]  # CPUs that the threads are pinned to
    threads: int  # number of threads

    @abstractmethod
    def submit(
        self, q: Tensor, layer: Tensor, pages: PageList, scale: float, what: str, owners: Owners | None = None
    ) -> Ticket:
        """Start the jobs of one layer and return without waiting.

        Args:
            q: ``[rows, heads, head_dim]`` queries; must not change until the jobs are done.
            layer: ``[pages, kv_heads, 2, page_size, head_dim]`` K and V of the layer on the host.
            pages: the pages that each row attends.
            scale: factor of the attention logits.
            what: name of the jobs in error messages.
            owners: requests of the rows. None: no row is ever skipped.
        """

    @abstractmethod
    def judge(self, prompt: PromptToJudge, what: str) -> Judging:
        """Start to judge a prompt and return without waiting. Jobs of `submit` go first.

        Args:
            prompt: the prompt; its tensors must not change until the result has come or the prompt is abandoned.
            what: name of the prompt in error messages.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the threads of the pool."""
