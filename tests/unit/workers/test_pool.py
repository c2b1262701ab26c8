"""Where worker threads run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid_backend.config import WorkersConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.workers import make_pool


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="this kernel shows no NUMA nodes")
def test_workers_stay_on_the_numa_node_that_was_asked_for() -> None:
    pool = make_pool(WorkersConfig(numa=0))
    try:
        assert pool.cpus and set(pool.cpus) <= os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())
    finally:
        pool.close()


def test_a_numa_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers\.numa: .* 4711"):
        make_pool(WorkersConfig(numa=4711))
