"""Exact when it fits: fp32 tokens of the hybrid backend equal those of the stock CPU backend, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.conftest import all_at_once
from tests.engine.server import Server, hybrid_server, stock_server
from tests.engine.texts import english

pytestmark = pytest.mark.engine

LENGTHS = (5, 17, 64, 200, 333, 700, 1000, 1500, 2048, 3100, 4500, 6950)
TOKENS = 24
# fp32 KV of the demo model: 46,080 bytes per token. 480 MiB hold 10,922 tokens (682 pages of 16).
POOL = 480 * 2**20
# Four prompts of 166 pages nearly fill the pool; their answers need 32 pages more: somebody must go.
CROWD_LENGTH, CROWD_TOKENS = 2650, 128
FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024", "--enforce-eager")


@dataclass(frozen=True)
class Answers:
    alone: list[str]
    crowd: list[str]


def prompts() -> list[str]:
    return [english(length, start=2500 * i) for i, length in enumerate(LENGTHS)]


def crowd() -> list[str]:
    return [english(CROWD_LENGTH, start=1000 + 5000 * i) for i in range(4)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Answers:
    folder = tmp_path_factory.mktemp("stock")
    flags = [*FLAGS, "--kv-cache-memory-bytes", str(POOL), "--block-size", "32"]
    with stock_server(folder, model_dir, flags) as server:
        return Answers(
            alone=[server.complete(prompt, TOKENS) for prompt in prompts()],
            crowd=[server.complete(prompt, CROWD_TOKENS, extra_body={"ignore_eos": True}) for prompt in crowd()],
        )


@pytest.fixture(scope="module", params=["separate", "unified"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {"tiers": request.param, "slots_per_request": 512, "host_pool.size": POOL}
    with hybrid_server(tmp_path_factory.mktemp(request.param), config, FLAGS) as server:
        yield server


def test_tokens_equal_the_stock_backends_alone_with_chunked_prefill(hybrid: Server, stock: Answers) -> None:
    answers = [hybrid.complete(prompt, TOKENS) for prompt in prompts()]
    assert answers == stock.alone
    assert hybrid.total("hybrid_cpu_tokens_total") == 0, "everything fits: nothing is left to the CPU workers"


def test_tokens_equal_the_stock_backends_four_at_once_with_prefix_cache_hits(hybrid: Server, stock: Answers) -> None:
    short = prompts()[:9]
    assert all_at_once(hybrid, short, TOKENS) == stock.alone[:9]
    before = hybrid.total("vllm:prefix_cache_hits_total")
    assert all_at_once(hybrid, short[::-1], TOKENS)[::-1] == stock.alone[:9]
    assert hybrid.total("vllm:prefix_cache_hits_total") > before, "the second round must hit the prefix cache"


def test_tokens_equal_the_stock_backends_through_a_forced_preemption(hybrid: Server, stock: Answers) -> None:
    from concurrent.futures import ThreadPoolExecutor

    before = hybrid.total("vllm:num_preemptions_total")
    with ThreadPoolExecutor(4) as pool:
        options = {"extra_body": {"ignore_eos": True}}
        answers = list(pool.map(lambda prompt: hybrid.complete(prompt, CROWD_TOKENS, **options), crowd()))
    assert hybrid.total("vllm:num_preemptions_total") > before, "nothing was preempted: this test shows nothing"
    assert answers == stock.crowd
    assert hybrid.total("hybrid_slots_in_use") == 0
