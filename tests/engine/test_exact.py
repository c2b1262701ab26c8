"""Exact when it fits: fp32 tokens of the hybrid backend equal those of the stock CPU backend, one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine import promises
from tests.engine.answers import StockAnswers
from tests.engine.conftest import CROWD_TOKENS, LENGTHS, POOL, TOKENS, fp32_crowd, fp32_prompts
from tests.engine.server import Server, hybrid_server

pytestmark = pytest.mark.engine
Served = tuple[Server, list[str]]

FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024", "--enforce-eager")


@pytest.fixture(scope="module", params=["separate", "unified"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = {"tiers": request.param, "slots_per_request": 512, "host_pool.size": POOL}
    with hybrid_server(tmp_path_factory.mktemp(request.param), config, FLAGS) as server:
        # Unified tiers without the one of 6,950 tokens, which takes a minute.
        yield server, fp32_prompts()[: None if request.param == "separate" else -1]


def test_tokens_equal_the_stock_backends_alone_with_chunked_prefill(hybrid: Served, stock_fp32: StockAnswers) -> None:
    server, asked = hybrid
    assert [server.complete(prompt, TOKENS) for prompt in asked] == stock_fp32.to(asked, TOKENS)
    assert server.total("hybrid_cpu_tokens_total") == 0, "everything fits: nothing is left to the CPU workers"


def test_tokens_equal_the_stock_backends_four_at_once_with_prefix_cache_hits(
    hybrid: Served, stock_fp32: StockAnswers
) -> None:
    server, asked = hybrid
    expected, longest = stock_fp32.to(asked, TOKENS), LENGTHS[len(asked) - 1]
    promises.cached_prompts_answer_the_same(server, asked, expected, TOKENS, longest, "vllm:prefix_cache_hits_total")


@pytest.mark.parametrize("hybrid", ["unified"], indirect=True, scope="module")
def test_tokens_equal_the_stock_backends_through_a_forced_preemption(hybrid: Served, stock_fp32: StockAnswers) -> None:
    """(Separate tiers: test_simulated_gpu.py.)"""
    server, _ = hybrid
    before = server.total("vllm:num_preemptions_total")
    answers = server.complete_all(fp32_crowd(), CROWD_TOKENS, extra_body={"ignore_eos": True})
    assert server.total("vllm:num_preemptions_total") > before, "nothing was preempted: this test shows nothing"
    assert answers == stock_fp32.to(fp32_crowd(), CROWD_TOKENS, ignore_eos=True)
    assert server.total("hybrid_slots_in_use") == 0
