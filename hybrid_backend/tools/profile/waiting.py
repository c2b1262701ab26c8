"""Waiting OpenMP threads that sleep, so that a profile beside other programs does not burn the cores that it needs.

libgomp's threads spin for milliseconds at the end of each parallel region. Where another program has one of the cores,
each region then costs that program's time slice, and the work five to thirteen times its CPU time
(docs/profile.md#beside-other-programs). ``OMP_WAIT_POLICY=PASSIVE`` ends the spinning, but libgomp reads it when torch
is loaded, and torch is loaded before ``hybrid profile`` runs. libgomp also stops spinning as soon as it has more
threads than the process may use CPUs. So a few threads with sleeping OpenMP threads of their own are kept during a
profile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

_PARALLEL_ELEMENTS = 1 << 16
"""Elements per thread with which torch begins a parallel region."""


def threads_to_keep(compute_threads: int, cpus: int) -> int:
    """Return how many threads, each with ``compute_threads - 1`` OpenMP threads, make libgomp's more than ``cpus``."""
    if compute_threads < 2:
        return 0
    return max(0, -(-(cpus + 1 - compute_threads) // (compute_threads - 1)))


@contextmanager
def sleeping_waiters(environment: Mapping[str, str]) -> Iterator[None]:
    """Let waiting OpenMP threads sleep, unless the ``environment`` says how they wait."""
    is_set = "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment
    compute_threads = torch.get_num_threads()
    count = 0 if is_set else threads_to_keep(compute_threads, len(os.sched_getaffinity(0)))
    is_done, have_begun = threading.Event(), threading.Barrier(count + 1)

    def keep_threads() -> None:
        torch.zeros(compute_threads * _PARALLEL_ELEMENTS).add_(1)
        have_begun.wait()
        is_done.wait()

    threads = [threading.Thread(target=keep_threads, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    have_begun.wait()
    try:
        yield
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
