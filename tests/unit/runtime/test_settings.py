"""What the server publishes of its configuration, by which the status page says what to change."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from hybrid_backend.observe.metrics import Publisher
from hybrid_backend.runtime import HybridRuntime
from tests.support.gpu import ON_GPU
from tests.support.harness import PAGE, Engine, config, spec

BUDGET, FRAMES = "hybrid_budget_tokens", "hybrid_frames_per_request"
RECALL = "hybrid_recall_interval"
OF_METHODS = (BUDGET, FRAMES, RECALL)


def published(**keys: Any) -> tuple[dict[str, float], HybridRuntime]:
    """The gauges of a server that has served nothing yet, all of which its publisher knows."""
    engine = Engine(config(**keys), spec(), num_pages=20, max_requests=3)
    gauges = engine.runtime.gauges()
    Publisher(engine.runtime.stats, lambda: gauges, 0, CollectorRegistry()).publish(force=True)
    return gauges, engine.runtime


@pytest.mark.skipif(ON_GPU, reason="quest is for CPUs")
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"method": "quest"}, {BUDGET: 4 * PAGE}),
        ({"method": "quest", "sparse": "never"}, {}),
        ({}, {BUDGET: 4 * PAGE, FRAMES: 6, RECALL: 8}),
        (
            {"frames_per_request": 9, "recall": {"intervals": 3}},
            {BUDGET: 64, FRAMES: 9, RECALL: 3},
        ),
        ({"recall": {"intervals": [3, 4, 5]}}, {BUDGET: 64, FRAMES: 6}),
        ({"recall": {"enabled": False}}, {BUDGET: 64, FRAMES: 6}),
        ({"sparse": "never"}, {FRAMES: 6}),
        ({"method": "infinigen"}, {BUDGET: 64, FRAMES: 6}),
        ({"method": "clo"}, {BUDGET: 64, FRAMES: 6}),
        ({"method": "dense"}, {}),
        ({"method": "hgca"}, {}),
    ],
    ids=str,
)
def test_a_key_is_published_as_it_is_served_and_only_where_it_does_something(
    keys: dict[str, Any], expected: dict[str, float]
) -> None:
    gauges, _ = published(**keys)
    assert {name: gauges[name] for name in OF_METHODS if name in gauges} == expected


def test_what_the_engine_was_started_with_is_published() -> None:
    gauges, runtime = published()
    model = spec()
    assert gauges["hybrid_page_tokens"] == PAGE and gauges["hybrid_max_requests"] == 3
    assert gauges["hybrid_host_pool_bytes"] == 20 * model.num_layers * model.page_bytes(PAGE)
    assert gauges["hybrid_worker_threads"] == 2
    assert gauges["hybrid_worker_cpus"] == len(set(runtime.workers.cpus)) >= 1
    assert ON_GPU or "hybrid_bus_bytes_per_second" not in gauges
