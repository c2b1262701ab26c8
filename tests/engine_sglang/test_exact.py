"""Exact when it fits: fp32 tokens of the hybrid backend equal those of SGLang's torch_native, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import promises
from tests.engine.answers import StockAnswers
from tests.engine.server import Server
from tests.engine_sglang.conftest import BYTES_PER_TOKEN, FLAGS, LENGTHS, POOL_TOKENS, TOKENS, prompts
from tests.engine_sglang.server import PAGE, hybrid_server, sglang_server

pytestmark = pytest.mark.engine
POOL = POOL_TOKENS * BYTES_PER_TOKEN
Served = tuple[Server, list[str]]


@pytest.fixture(scope="module", params=["separate", "unified"])
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[Served]:
    """Separate tiers as `hybrid serve` starts them; unified ones by SGLang's own command line and a file."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "separate":
        config = {"tiers": "separate", "slots_per_request": 440, "host_pool.size": POOL}
        with hybrid_server(folder, config, [*FLAGS, "--max-running-requests", "4"]) as server:
            yield server, prompts()
        return
    file = folder / "hybrid.yaml"
    file.write_text(f"page_size: {PAGE}\nslots_per_request: 440\nhost_pool: {{size: {POOL}}}\n")
    flags = ["--attention-backend", "hybrid", "--enable-metrics", *FLAGS]
    with sglang_server(folder, model_dir, flags, {"HYBRID_CONFIG": str(file)}) as server:
        yield server, prompts()[:-1]  # without the one of 6,950 tokens, which takes minutes


def test_tokens_equal_torch_native_alone_with_chunked_prefill(hybrid: Served, stock: StockAnswers) -> None:
    server, asked = hybrid
    assert [server.complete(prompt, TOKENS) for prompt in asked] == stock.to(asked, TOKENS)
    assert server.total("hybrid_selected_tokens_total") > 0
    assert server.total("hybrid_cpu_tokens_total") == 0, "everything fits: nothing is left to the CPU workers"


def test_tokens_equal_torch_native_four_at_once_with_radix_cache_hits(hybrid: Served, stock: StockAnswers) -> None:
    server, asked = hybrid
    expected, longest = stock.to(asked, TOKENS), LENGTHS[len(asked) - 1]
    promises.cached_prompts_answer_the_same(server, asked, expected, TOKENS, longest, "sglang:cached_tokens_total")
    for gauge in ("hybrid_regions_in_use", "hybrid_slots_in_use"):
        assert server.total(gauge) == 0, gauge


def test_the_pool_is_the_host_budget(hybrid: Served) -> None:
    """SGLang keeps one page more, into which it writes what nobody reads."""
    assert hybrid[0].total("hybrid_host_pool_pages") == POOL_TOKENS // PAGE + 1
