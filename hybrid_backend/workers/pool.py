"""Pools of CPU workers, which compute partials of a layer while the device computes the layer before."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial
from hybrid_backend.config import WorkersConfig
from hybrid_backend.errors import ConfigError, DeadlineError, WorkerError
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.operations import PromptToJudge
from hybrid_backend.workers.base import Owners, Ticket, WorkerPool
from hybrid_backend.workers.cpus import (
    ALONE,
    Bound,
    Places,
    Rank,
    Topology,
    check_cpus,
    cpu_quota,
    spare_cpus,
    within_quota,
)
from hybrid_backend.workers.ipex import IpexPool
from hybrid_backend.workers.judging import JudgeThread, Judging, PoolJudging, begin_worker
from hybrid_backend.workers.registry import IPEX, PartialKernel, kernel_name, resolve_kernel

THREADS_PER_CPU = 4
"""Limit of ``workers.threads`` per CPU of the machine; a larger number is taken for a typing error."""


def make_pool(config: WorkersConfig, rank: Rank = ALONE) -> WorkerPool:
    """Build the pool for the configured kernel: C++ threads, Python threads, or an IPEX process.

    Args:
        config: section ``workers`` of the configuration.
        rank: this process among the engine's ranks on this machine, which share the CPUs.

    Raises:
        ConfigError: this machine lacks a CPU, NUMA node or kernel that ``workers`` names, or ``threads`` is too large.
    """
    bound, topology = Bound.read(), Topology.read()
    if config.cpus == "auto":
        cpus = within_quota(spare_cpus(bound, topology, config.numa, rank), cpu_quota(), rank.count)
    else:
        cpus = check_cpus(config.cpus, bound.allowed)
    if kernel_name(config.kernel) == "native":
        resolve_kernel("native")  # Raises the error that says why the kernel does not run on this machine.
        places = Places.of(cpus, bound, topology, rank, chosen=config.cpus != "auto")
        threads = len(places.workers) if config.threads == "auto" else _checked_threads(config.threads, len(cpus))
        try:
            return NativePool(threads, places.workers, places.server, places.spin_seconds)
        except WorkerError as error:
            raise ConfigError(
                f"workers.threads: {threads} threads cannot be started ({error}); write auto, or {len(cpus)} or fewer"
            ) from error
    threads = len(cpus) if config.threads == "auto" else _checked_threads(config.threads, len(cpus))
    if config.kernel == IPEX:
        return IpexPool(threads, cpus)
    return TorchPool(threads, cpus, resolve_kernel(config.kernel))


def _checked_threads(threads: int, cpus: int) -> int:
    """Return ``threads`` if the number is plausible. More threads than CPUs are allowed.

    Raises:
        ConfigError: more than `THREADS_PER_CPU` threads for each CPU of this machine.
    """
    limit = max(64, THREADS_PER_CPU * (os.cpu_count() or 1))
    if threads > limit:
        raise ConfigError(f"workers.threads: {threads} is more than the {limit} of this machine; write auto, or {cpus}")
    return threads


class NativePool(WorkerPool):
    """A pool of C++ threads, which need no Python interpreter lock. An idle thread takes jobs of busy threads."""

    def __init__(self, threads: int, cpus: Sequence[int], server: int | None = None, spin_seconds: float = 0.0) -> None:
        """Start the threads.

        Args:
            threads: number of threads besides the server thread.
            cpus: CPUs that the threads are pinned to, in turn.
            server: CPU of the thread that polls a GPU's mailboxes. None: the pool has no such thread.
            spin_seconds: how long an idle thread polls before it sleeps. Threads that share a CPU do not poll.
        """
        self.cpus = list(cpus)
        self.threads = threads
        if threads > len(set(cpus) - {server}):
            spin_seconds = 0.0
        pins = [cpus[i % len(cpus)] for i in range(threads)]
        self.native = cpu.Pool(threads, pins, spin_seconds=spin_seconds, server_cpu=server)

    def submit(
        self, q: Tensor, layer: Tensor, pages: PageList, scale: float, what: str, owners: Owners | None = None
    ) -> Ticket:
        owner_tensors = owners._asdict() if owners is not None else {}
        return _NativeTicket(self.native.submit(q, layer, pages.ids, pages.valid, scale, what=what, **owner_tensors))

    def judge(self, prompt: PromptToJudge, what: str) -> Judging:
        return PoolJudging(cpu.NativeJudging(self.native, prompt, what), what)

    def close(self) -> None:
        self.native.close()


class _NativeTicket:
    def __init__(self, ticket: cpu.NativeTicket) -> None:
        self._ticket = ticket
        self.submit_time = time.perf_counter()

    def wait(self, deadline: float) -> Partial:
        return Partial(*self._ticket.wait(deadline))

    def done(self) -> bool:
        return self._ticket.done()

    def abandon(self) -> None:
        self._ticket.abandon()


class TorchPool(WorkerPool):
    """A pool of Python threads that run a kernel written with torch, whose operations release the interpreter lock.

    Each row of a submission is a job of its own.
    """

    def __init__(self, threads: int, cpus: list[int], kernel: PartialKernel) -> None:
        self.cpus = cpus
        self.threads = threads
        self._kernel = kernel
        self._executor = ThreadPoolExecutor(
            threads,
            thread_name_prefix="hybrid-worker",
            initializer=begin_worker,
            initargs=(cpus, torch.get_num_threads()),
        )
        self._judge = JudgeThread(cpus)

    def submit(
        self, q: Tensor, layer: Tensor, pages: PageList, scale: float, what: str, owners: Owners | None = None
    ) -> Ticket:
        rows = [slice(r, r + 1) for r in range(len(q))]
        return _TorchTicket([self._executor.submit(self._run, row, q, layer, pages, scale) for row in rows], what)

    def judge(self, prompt: PromptToJudge, what: str) -> Judging:
        return self._judge.judge(prompt, what)

    def close(self) -> None:
        self._judge.close()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, rows: slice, q: Tensor, layer: Tensor, pages: PageList, scale: float) -> Partial:
        with torch.inference_mode():
            return self._kernel(q[rows], layer, PageList(pages.ids[rows], pages.valid[rows]), scale)


class _TorchTicket:
    def __init__(self, futures: list[Future[Partial]], description: str) -> None:
        self._futures = futures
        self._description = description
        self._abandoned = False
        self.submit_time = time.perf_counter()

    def wait(self, deadline: float) -> Partial:
        if self._abandoned:
            raise WorkerError(f"{self._description} was abandoned")
        late_jobs = wait(self._futures, timeout=deadline).not_done
        if late_jobs:
            self.abandon()
            raise DeadlineError(
                f"CPU workers did not finish {len(late_jobs)} of {len(self._futures)} jobs of {self._description} "
                f"within workers.deadline_seconds={deadline}"
            )
        try:
            partials = [future.result() for future in self._futures]
        except Exception as error:
            raise WorkerError(f"a CPU worker failed on {self._description}: {error}") from error
        if len(partials) == 1:
            return partials[0]
        return Partial(torch.cat([p.out for p in partials]), torch.cat([p.lse for p in partials]))

    def done(self) -> bool:
        return self._abandoned or not wait(self._futures, timeout=0).not_done

    def abandon(self) -> None:
        self._abandoned = True
        for future in self._futures:
            future.cancel()
