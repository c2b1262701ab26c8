"""Twenty seconds of `bench/soak.py` (`make soak` runs it for ten minutes and watches memory), and a leak test."""

from __future__ import annotations

import math

import pytest
import torch

from bench.soak import Soak, resident_mb
from hybrid_backend.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


def test_soak() -> None:
    # Memory is no matter here: over random shapes allocators need minutes to settle.
    summary = Soak(submitters=8, threads=2, seed=1, growth_limit=math.inf).run(20)
    assert summary.counts["jobs"] > 50 and summary.counts["checked"] > 5
    assert all(summary.counts[name] for name in ("abandoned", "stale", "freed")), str(summary)


def test_finished_and_abandoned_jobs_leave_no_memory_behind() -> None:
    # Jobs of one shape, one after the other: the allocator is at rest after the first. 64 kB of queries and 128 kB of
    # results each, so 1,000 jobs that leak either half of the time grow by 30 MB or more.
    layer = torch.randn(8, 8, 2, 16, 128).bfloat16()
    ids = torch.arange(8).expand(8, 1, 8).contiguous()
    valid = torch.ones_like(ids)
    with cpu.Pool(2) as pool:

        def some_jobs(count: int) -> float:
            for which in range(count):
                ticket = pool.submit(torch.zeros(8, 32, 128, dtype=torch.bfloat16), layer, ids, valid, 1.0)
                ticket.abandon() if which % 2 else ticket.wait(30.0)
            pool.submit(torch.zeros(8, 32, 128, dtype=torch.bfloat16), layer, ids, valid, 1.0).wait(30.0)
            return resident_mb()

        before = some_jobs(200)
        assert some_jobs(1000) - before < 10
