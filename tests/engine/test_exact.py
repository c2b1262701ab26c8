"""Exact when it fits: fp32 tokens of the hybrid backend equal those of the stock CPU backend, one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.answers import StockAnswers
from tests.engine.conftest import CROWD_TOKENS, POOL, TOKENS, fp32_crowd, fp32_prompts
from tests.engine.server import Server, hybrid_server

pytestmark = pytest.mark.engine

FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024", "--enforce-eager")


@pytest.fixture(scope="module", params=["separate", "unified"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {"tiers": request.param, "slots_per_request": 512, "host_pool.size": POOL}
    with hybrid_server(tmp_path_factory.mktemp(request.param), config, FLAGS) as server:
        yield server


def test_tokens_equal_the_stock_backends_alone_with_chunked_prefill(hybrid: Server, stock_fp32: StockAnswers) -> None:
    answers = [hybrid.complete(prompt, TOKENS) for prompt in fp32_prompts()]
    assert answers == stock_fp32.to(fp32_prompts(), TOKENS)
    assert hybrid.total("hybrid_cpu_tokens_total") == 0, "everything fits: nothing is left to the CPU workers"


def test_tokens_equal_the_stock_backends_four_at_once_with_prefix_cache_hits(
    hybrid: Server, stock_fp32: StockAnswers
) -> None:
    expected = stock_fp32.to(fp32_prompts(), TOKENS)
    assert hybrid.complete(fp32_prompts()[-1], TOKENS) == expected[-1]
    before = hybrid.total("vllm:prefix_cache_hits_total")
    assert hybrid.complete(fp32_prompts()[-1], TOKENS) == expected[-1]
    hits = hybrid.total("vllm:prefix_cache_hits_total") - before
    assert hits > 6000, f"only {hits} of 6,950 tokens came from the prefix cache"
    assert hybrid.complete_all(fp32_prompts()[::-1], TOKENS)[::-1] == expected


def test_tokens_equal_the_stock_backends_through_a_forced_preemption(hybrid: Server, stock_fp32: StockAnswers) -> None:
    from concurrent.futures import ThreadPoolExecutor

    before = hybrid.total("vllm:num_preemptions_total")
    with ThreadPoolExecutor(4) as pool:
        options = {"extra_body": {"ignore_eos": True}}
        answers = list(pool.map(lambda prompt: hybrid.complete(prompt, CROWD_TOKENS, **options), fp32_crowd()))
    assert hybrid.total("vllm:num_preemptions_total") > before, "nothing was preempted: this test shows nothing"
    assert answers == stock_fp32.to(fp32_crowd(), CROWD_TOKENS, ignore_eos=True)
    assert hybrid.total("hybrid_slots_in_use") == 0
