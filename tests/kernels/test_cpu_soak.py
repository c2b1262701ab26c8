"""Twenty seconds of `bench/soak.py`; `make soak` runs it for ten minutes."""

from __future__ import annotations

import pytest

from bench.soak import Soak
from hybrid_backend.kernels import cpu


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))
def test_soak() -> None:
    # Within twenty seconds allocators have not settled: this catches gross leaks, `make soak` the small ones.
    summary = Soak(submitters=8, threads=2, seed=1, growth_limit=64).run(20)
    assert summary.counts["jobs"] > 50 and summary.counts["checked"] > 5
    assert all(summary.counts[name] for name in ("abandoned", "stale", "freed")), str(summary)
