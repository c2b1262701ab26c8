"""Exact when it fits: fp32 tokens of the hybrid backend equal those of the engine's own CPU backend, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.engines import promises
from tests.engines.answers import StockAnswers
from tests.engines.conftest import TOKENS
from tests.engines.installed import only
from tests.engines.server import Server

pytestmark = pytest.mark.engine
Served = tuple[Server, list[str]]


@pytest.fixture(scope="module", params=["scout", "quest"])
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path, engine: ModuleType
) -> Iterator[Served]:
    with engine.exact_server(tmp_path_factory.mktemp(request.param), model_dir, request.param) as server:
        # Quest without the prompt of 6,950 tokens, which takes minutes.
        yield server, engine.prompts()[: None if request.param == "scout" else -1]


def test_tokens_equal_the_stock_backends_alone_with_chunked_prefill(hybrid: Served, stock: StockAnswers) -> None:
    server, asked = hybrid
    assert [server.complete(prompt, TOKENS) for prompt in asked] == stock.to(asked, TOKENS)
    assert server.total("hybrid_selected_tokens_total") > 0
    assert server.total("hybrid_cpu_tokens_total") == 0, "everything fits: nothing is left to the CPU workers"


def test_tokens_equal_the_stock_backends_four_at_once_with_prefix_cache_hits(
    hybrid: Served, stock: StockAnswers, engine: ModuleType
) -> None:
    server, asked = hybrid
    expected, longest = stock.to(asked, TOKENS), engine.LENGTHS[len(asked) - 1]
    promises.cached_prompts_answer_the_same(server, asked, expected, TOKENS, longest, engine.PREFIX_HITS)
    promises.nothing_is_left(server)


@only("vllm", "SGLang retracts in sglang/test_serving.py")
@pytest.mark.parametrize("hybrid", ["quest"], indirect=True, scope="module")
def test_tokens_equal_the_stock_backends_through_a_forced_preemption(
    hybrid: Served, stock: StockAnswers, engine: ModuleType
) -> None:
    """Scout is preempted in vllm/test_simulated_gpu.py."""
    server, _ = hybrid
    before = server.total("vllm:num_preemptions_total")
    answers = server.complete_all(engine.crowd(), engine.CROWD_TOKENS, extra_body={"ignore_eos": True})
    assert server.total("vllm:num_preemptions_total") > before, "nothing was preempted: this test shows nothing"
    assert answers == stock.to(engine.crowd(), engine.CROWD_TOKENS, ignore_eos=True)
    promises.nothing_is_left(server)
