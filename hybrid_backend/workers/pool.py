"""CPU workers: threads that compute partials while the device tier computes the layer before them."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial
from hybrid_backend.config import WorkersConfig
from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.workers.registry import PartialKernel, resolve_kernel


def spare_cpus() -> list[int]:
    """CPUs for the workers: those that the engine's compute threads are not pinned to, or all if none is spare.

    An engine may have pinned this thread to its compute cores, so what the process may use is read from its parent.
    """
    pinned = os.sched_getaffinity(0)
    try:
        allowed = os.sched_getaffinity(os.getppid()) | pinned
    except (PermissionError, ProcessLookupError):
        allowed = pinned
    return sorted(allowed - pinned or allowed)


@dataclass(frozen=True)
class _Timed:
    partial: Partial
    started: float
    ended: float


class Ticket:
    """A submitted set of jobs. ``wait`` returns their partial or raises what a worker raised."""

    def __init__(self, futures: list[Future[_Timed]], description: str) -> None:
        self._futures = futures
        self._description = description
        self.submitted = time.perf_counter()

    def wait(self, deadline: float) -> Partial:
        """The partial ``[rows, heads, head_dim]``.

        Raises:
            DeadlineError: the workers did not answer within ``deadline`` seconds; names the job.
            WorkerError: a worker failed; its exception is the cause.
        """
        late = wait(self._futures, timeout=deadline).not_done
        if late:
            self.abandon()
            raise DeadlineError(
                f"CPU workers did not finish {len(late)} of {len(self._futures)} jobs of {self._description} "
                f"within workers.deadline_seconds={deadline}"
            )
        try:
            parts = [future.result().partial for future in self._futures]
        except Exception as error:
            raise WorkerError(f"a CPU worker failed on {self._description}: {error}") from error
        if len(parts) == 1:
            return parts[0]
        return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))

    def span(self) -> tuple[float, float]:
        """When the first job started and the last one ended (`time.perf_counter`); all must have ended."""
        timed = [future.result() for future in self._futures]
        return min(t.started for t in timed), max(t.ended for t in timed)

    def abandon(self) -> None:
        """Forget the jobs: those not begun are dropped, a running one ends into memory that nobody reads."""
        for future in self._futures:
            future.cancel()


class WorkerPool:
    """Threads, pinned away from the engine's compute cores, that run one partial-attention kernel.

    A job owns its output, so a job of a request that is gone can never write into another request's result.
    With ``per_sequence_groups`` each sequence is a job of its own (ScoutAttention section 3.3 gives each sequence its
    own group of threads); otherwise the whole batch is one job.
    """

    def __init__(self, config: WorkersConfig, kernel: PartialKernel | None = None) -> None:
        self._kernel = kernel or resolve_kernel(config.kernel)
        self._per_sequence = config.per_sequence_groups
        self.cpus = spare_cpus() if config.cpus == "auto" else list(config.cpus)
        self.threads = len(self.cpus) if config.threads == "auto" else config.threads
        self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="hybrid-worker", initializer=self._pin)

    def submit(self, q: Tensor, blocks: Tensor, pages: PageList, kv_heads: int, scale: float, what: str) -> Ticket:
        """Start the jobs of one layer and return at once. ``q`` ``[rows, heads, head_dim]`` must not change."""
        if self._per_sequence:
            shares = [(q[r : r + 1], PageList(pages.ids[r : r + 1], pages.valid[r : r + 1])) for r in range(len(q))]
        else:
            shares = [(q, pages)]
        return Ticket([self._executor.submit(self._run, s, blocks, p, kv_heads, scale) for s, p in shares], what)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _pin(self) -> None:
        os.sched_setaffinity(0, self.cpus)
        # One OpenMP thread per worker: the pool is the parallelism. vLLM replaces torch.set_num_threads by a no-op, and
        # the setting is this thread's own, so ask the C function.
        torch._C.set_num_threads(1)

    def _run(self, q: Tensor, blocks: Tensor, pages: PageList, kv_heads: int, scale: float) -> _Timed:
        with torch.inference_mode():
            started = time.perf_counter()
            partial = self._kernel(q, blocks, pages, kv_heads, scale)
            return _Timed(partial, started, time.perf_counter())
