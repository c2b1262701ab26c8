"""Waiting OpenMP threads sleep while a profile runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hybrid_backend.tools.profile.waiting import sleeping_waiters, threads_to_keep

# Two OpenMP threads share one CPU, so the one that waits burns its time slices unless it sleeps.
_ON_ONE_CPU = """
import contextlib, os, sys, time
import torch
from hybrid_backend.tools.profile.waiting import sleeping_waiters

numbers = torch.zeros(1 << 17)
torch.set_num_threads(2)
with sleeping_waiters({}) if sys.argv[1] == "sleeping" else contextlib.nullcontext():
    numbers.add_(1)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
    began = time.process_time()
    for _ in range(300):
        numbers.add_(1)
    print(time.process_time() - began)
"""


@pytest.mark.parametrize(
    ("compute_threads", "cpus", "count"), [(1, 2, 0), (2, 2, 1), (2, 4, 3), (8, 16, 2), (4, 2, 0), (16, 16, 1)]
)
def test_as_few_threads_are_kept_as_make_more_than_there_are_cpus(compute_threads: int, cpus: int, count: int) -> None:
    assert threads_to_keep(compute_threads, cpus) == count
    if compute_threads > 1:
        assert compute_threads + count * (compute_threads - 1) > cpus
        assert not count or compute_threads + (count - 1) * (compute_threads - 1) <= cpus


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="libgomp does not spin on a single CPU")
def test_a_thread_that_waits_for_another_one_on_its_cpu_burns_no_time() -> None:
    root = Path(__file__).parents[3]
    unset = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}

    def seconds(how: str) -> float:
        command = [sys.executable, "-c", _ON_ONE_CPU, how]
        return float(subprocess.run(command, cwd=root, env=unset, check=True, capture_output=True, text=True).stdout)

    assert seconds("sleeping") < seconds("spinning") / 2


@pytest.mark.parametrize("key", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_who_has_said_how_threads_wait_keeps_it(key: str) -> None:
    before = threading.active_count()
    with sleeping_waiters({key: "1"}):
        assert threading.active_count() == before


def test_no_thread_is_left_afterwards() -> None:
    before = threading.active_count()
    with sleeping_waiters({}):
        kept = threads_to_keep(torch.get_num_threads(), len(os.sched_getaffinity(0)))
        assert threading.active_count() == before + kept
    assert threading.active_count() == before
