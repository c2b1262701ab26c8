"""Every other method behind the same flag, unchanged: exact where it promises to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.server import Server
from tests.engine_sglang.conftest import TOKENS, StockAnswers, all_at_once, prompts
from tests.engine_sglang.server import hybrid_server

pytestmark = pytest.mark.engine
FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "512", "--max-running-requests", "4")
SHORT = 6  # up to 1,500 tokens
# Conditions in which each method promises the stock backend's tokens.
EXACT: dict[str, dict[str, Any]] = {
    "dense": {},
    "hgca": {"hgca.window_tokens": 2048},
    # Two buffers of 432 tokens: less than a third of the longest context is on the device at a time.
    "headinfer": {"staging_tokens": 432, "headinfer.group_thresholds": [256, 1024]},
    "infinigen": {"budget_tokens": 2048, "sparse": "always", "slots_per_request": 136},
}


@pytest.fixture(scope="module", params=list(EXACT))
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    keys = {"method": request.param, "tiers": "separate", "host_pool.size": "256MiB", **EXACT[request.param]}
    with hybrid_server(tmp_path_factory.mktemp(request.param), keys, FLAGS) as server:
        yield request.param, server


def test_tokens_equal_torch_native_alone_and_four_at_once(exact: tuple[str, Server], stock: StockAnswers) -> None:
    method, server = exact
    asked, expected = prompts()[:SHORT], stock.alone[:SHORT]
    assert [server.complete(prompt, TOKENS) for prompt in asked] == expected
    assert all_at_once(server, asked, TOKENS) == expected
    assert server.total("hybrid_cpu_tokens_total") == 0
    if method != "dense":  # which has nothing on the device
        assert server.total("hybrid_copied_bytes") > 0
    assert server.total("hybrid_regions_in_use") == 0
