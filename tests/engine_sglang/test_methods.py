"""Every other method behind the same flag, unchanged: exact where it promises to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.answers import StockAnswers
from tests.engine.server import Server
from tests.engine_sglang.conftest import TOKENS, prompts
from tests.engine_sglang.server import hybrid_server

pytestmark = pytest.mark.engine
FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "512", "--max-running-requests", "4")
SHORT = 6  # up to 700 tokens
# Conditions in which each method promises the stock backend's tokens.
EXACT: dict[str, dict[str, Any]] = {
    "hgca": {"hgca.window_tokens": 1024},
    # Two buffers of 224 tokens: less than a third of the longest context is on the device at a time.
    "headinfer": {"staging_tokens": 224, "headinfer.group_thresholds": [128, 512]},
    "infinigen": {"budget_tokens": 1024, "sparse": "always", "slots_per_request": 72},
}


@pytest.fixture(scope="module", params=list(EXACT))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {"method": request.param, "tiers": "separate", "host_pool.size": "256MiB", **EXACT[request.param]}
    with hybrid_server(tmp_path_factory.mktemp(request.param), keys, FLAGS) as server:
        yield server


def test_tokens_equal_torch_native_alone_and_four_at_once(served: Server, stock: StockAnswers) -> None:
    asked = prompts()[:SHORT]
    expected = stock.to(asked, TOKENS)
    assert [served.complete(prompt, TOKENS) for prompt in asked] == expected
    assert served.complete_all(asked, TOKENS) == expected
    assert served.total("hybrid_cpu_tokens_total") == 0
    assert served.total("hybrid_copied_bytes") > 0
    assert served.total("hybrid_regions_in_use") == 0
