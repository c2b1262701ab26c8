"""Every other method through the same engine flag: exact where it promises to be, and nothing left behind by aborts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.answers import StockAnswers
from tests.engine.conftest import TOKENS, fp32_prompts
from tests.engine.server import Server, hybrid_server
from tests.engine.storm import abort_storm

pytestmark = pytest.mark.engine
FLAGS = ("--dtype", "float32", "--max-num-batched-tokens", "512", "--enforce-eager")
# Of the prompts: 5 to 400 tokens; HeadInfer, which promises any context, also gets the one of 1,200.
SOME = {"dense": (2, 5), "hgca": (0, 2, 4, 6), "headinfer": (0, 2, 4, 6, 10), "infinigen": (0, 2, 4, 6)}
# Each method promises the stock backend's tokens for these prompts, but not for those of 700 tokens and more.
KEYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "hgca": {"hgca.window_tokens": 448},
    # Two buffers of 160 tokens: a quarter of the longest context is on the device at a time.
    # Some heads never leave it. (Buffers of one page: tests/runtime/test_headinfer.py.)
    "headinfer": {
        "staging_tokens": 160,
        "headinfer.group_thresholds": [256, 1024],
        "headinfer.resident_heads": ["3:1", "9:0", "9:2"],
    },
    "infinigen": {"budget_tokens": 448, "sparse": "always", "slots_per_request": 32},
}


@pytest.fixture(scope="module", params=list(KEYS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    keys = {"method": request.param, "tiers": "separate", "host_pool.size": "512MiB", **KEYS[request.param]}
    with hybrid_server(tmp_path_factory.mktemp(request.param), keys, [*FLAGS, "--max-num-seqs", "32"]) as server:
        yield request.param, server


def test_tokens_equal_the_stock_backends_alone_and_four_at_once(
    served: tuple[str, Server], stock_fp32: StockAnswers
) -> None:
    method, server = served
    some, four = [fp32_prompts()[i] for i in SOME[method]], fp32_prompts()[3:7]
    assert [server.complete(prompt, TOKENS) for prompt in some] == stock_fp32.to(some, TOKENS)
    assert server.complete_all(four, TOKENS) == stock_fp32.to(four, TOKENS)
    assert server.total("hybrid_cpu_tokens_total") == 0
    if method != "dense":  # which has nothing on the device
        assert server.total("hybrid_device_bytes") > 0
        assert server.total("hybrid_copied_bytes") > 0


@pytest.mark.parametrize("served", [method for method in KEYS if method != "dense"], indirect=True, scope="module")
def test_two_hundred_requests_with_random_aborts_leave_nothing_behind(served: tuple[str, Server]) -> None:
    """Survivors fit the window or the slots, where every method is exact: they answer as if they were alone. (``dense``
    keeps nothing of a request.)"""
    _, server = served
    abort_storm(server, survivor_lengths=(8, 40, 150, 200), aborted_length=700, aborted_tokens=200)
    assert "Traceback" not in server.log.read_text()
