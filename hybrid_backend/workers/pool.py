"""CPU workers: threads that compute partials while the device tier computes the layer before them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial
from hybrid_backend.config import WorkersConfig
from hybrid_backend.errors import ConfigError, DeadlineError, WorkerError
from hybrid_backend.kernels import cpu
from hybrid_backend.workers.base import Owners, Ticket, WorkerPool
from hybrid_backend.workers.cpus import (
    ALONE,
    Bound,
    Places,
    Rank,
    Topology,
    check_cpus,
    cpu_quota,
    name_thread,
    spare_cpus,
    within_quota,
)
from hybrid_backend.workers.ipex import IpexPool
from hybrid_backend.workers.registry import IPEX, PartialKernel, kernel_name, resolve_kernel

THREADS_PER_CPU = 4
"""More worker threads than this for each CPU are a slip of the pen."""


def make_pool(config: WorkersConfig, rank: Rank = ALONE) -> WorkerPool:
    """The pool that fits the kernel: C++ threads for the native one, a process for IPEX, Python threads for others.

    Args:
        rank: this process among those of this machine that need workers; by default it is the only one.

    Raises:
        ConfigError: ``workers`` asks for CPUs, a node, threads or a kernel that this machine lacks.
    """
    bound, topology = Bound.now(), Topology.read()
    if config.cpus == "auto":
        cpus = within_quota(spare_cpus(bound, topology, config.numa, rank), cpu_quota(), rank.count)
    else:
        cpus = check_cpus(config.cpus, bound.allowed)
    if kernel_name(config.kernel) == "native":
        resolve_kernel("native")  # refuses with a reason where it does not run
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
    """Return ``threads``, which may be more than the CPUs, but not so many that their number is a mistake.

    Raises:
        ConfigError: more than `THREADS_PER_CPU` threads for each CPU of this machine.
    """
    most = max(64, THREADS_PER_CPU * (os.cpu_count() or 1))
    if threads > most:
        raise ConfigError(f"workers.threads: {threads} is more than the {most} of this machine; write auto, or {cpus}")
    return threads


class NativePool(WorkerPool):
    """C++ threads; no Python and no interpreter lock while they work. Sequences are their own groups, with stealing.

    Args:
        cpus, server, spin_seconds: as in `cpus.Places`. Threads that share a CPU do not spin.
    """

    def __init__(self, threads: int, cpus: Sequence[int], server: int | None = None, spin_seconds: float = 0.0) -> None:
        self.cpus = list(cpus)
        self.threads = threads
        if threads > len(set(cpus) - {server}):
            spin_seconds = 0.0
        pins = [cpus[i % len(cpus)] for i in range(threads)]
        self.native = cpu.Pool(threads, pins, spin_seconds=spin_seconds, server_cpu=server)

    def submit(
        self, q: Tensor, layer: Tensor, pages: PageList, scale: float, what: str, owners: Owners | None = None
    ) -> Ticket:
        named = owners._asdict() if owners is not None else {}
        return _NativeTicket(self.native.submit(q, layer, pages.ids, pages.valid, scale, what=what, **named))

    def close(self) -> None:
        self.native.close()


class _NativeTicket:
    def __init__(self, ticket: cpu.NativeTicket) -> None:
        self._ticket = ticket
        self.asked = time.perf_counter()

    def wait(self, deadline: float) -> Partial:
        return Partial(*self._ticket.wait(deadline))

    def done(self) -> bool:
        return self._ticket.done()

    def abandon(self) -> None:
        self._ticket.abandon()


class TorchPool(WorkerPool):
    """Python threads around a kernel written with torch, whose operations release the interpreter lock. Each sequence
    of a batch is a job of its own."""

    def __init__(self, threads: int, cpus: list[int], kernel: PartialKernel) -> None:
        self.cpus = cpus
        self.threads = threads
        self._kernel = kernel
        self._openmp_threads = torch.get_num_threads()  # the engine's
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="hybrid-worker", initializer=self._pin)

    def submit(
        self, q: Tensor, layer: Tensor, pages: PageList, scale: float, what: str, owners: Owners | None = None
    ) -> Ticket:
        rows = [slice(r, r + 1) for r in range(len(q))]
        return _TorchTicket([self._executor.submit(self._run, row, q, layer, pages, scale) for row in rows], what)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _pin(self) -> None:
        name_thread()
        os.sched_setaffinity(0, self.cpus)
        # One OpenMP thread per worker: the pool is the parallelism. vLLM replaces torch.set_num_threads by a no-op, so
        # ask the C function. It sets this thread's own number, and what threads to come begin with: that is given back.
        torch._C.set_num_threads(1)
        giver = threading.Thread(target=torch._C.set_num_threads, args=(self._openmp_threads,))
        giver.start()
        giver.join()

    def _run(self, rows: slice, q: Tensor, layer: Tensor, pages: PageList, scale: float) -> Partial:
        with torch.inference_mode():
            return self._kernel(q[rows], layer, PageList(pages.ids[rows], pages.valid[rows]), scale)


class _TorchTicket:
    def __init__(self, futures: list[Future[Partial]], description: str) -> None:
        self._futures = futures
        self._description = description
        self._abandoned = False
        self.asked = time.perf_counter()

    def wait(self, deadline: float) -> Partial:
        if self._abandoned:
            raise WorkerError(f"{self._description} was abandoned")
        late = wait(self._futures, timeout=deadline).not_done
        if late:
            self.abandon()
            raise DeadlineError(
                f"CPU workers did not finish {len(late)} of {len(self._futures)} jobs of {self._description} "
                f"within workers.deadline_seconds={deadline}"
            )
        try:
            parts = [future.result() for future in self._futures]
        except Exception as error:
            raise WorkerError(f"a CPU worker failed on {self._description}: {error}") from error
        if len(parts) == 1:
            return parts[0]
        return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))

    def done(self) -> bool:
        return self._abandoned or not wait(self._futures, timeout=0).not_done

    def abandon(self) -> None:
        self._abandoned = True
        for future in self._futures:
            future.cancel()
