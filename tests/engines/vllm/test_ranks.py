"""Two tensor-parallel ranks over HTTP: heads are shared, tokens one stock server's, and who leaves leaves nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.server import MODEL, Server, all_of, hybrid_server, stock_server
from tests.engines.storm import abort_storm
from tests.engines.texts import english
from tests.support.models import write_llama

pytestmark = pytest.mark.engine

TOKENS = 12
LENGTHS = (5, 31, 130, 333, 700)
# The frames hold 192 tokens of a request, the budget any of these prompts: what has no frame is the CPU workers', by
# the true query, so that nothing is approximate and both ranks' workers have their part.
KEYS = {
    "page_size": 16,
    "method": "scout",
    "frames_per_request": 12,
    "budget_tokens": 2048,
    "lookahead.partial_query": "real",
    "host_pool.size": "64MiB",
}
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16", "--max-num-batched-tokens", "512")


class Servers(NamedTuple):
    stock: Server
    ranks: Server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Servers]:
    """(The demo model has three KV heads: two ranks cannot share them.)"""
    logs, model = tmp_path_factory.mktemp("logs"), write_llama(tmp_path_factory.mktemp("model"), model_dir)
    flags = (*FLAGS, "--served-model-name", MODEL, "--tensor-parallel-size=2")
    chosen = {"VLLM_CPU_NUM_OF_RESERVED_CPU": ""}  # which cores a rank computes on is left to `hybrid serve`
    ours = hybrid_server(logs, KEYS, flags, str(model), environment=chosen)
    starts = [stock_server(logs, model, (*FLAGS, "--kv-cache-memory-bytes", str(64 * 2**20))), ours]
    with all_of(starts) as (stock, ranks):
        yield Servers(stock, replace(ranks, model=MODEL))


def by_rank(servers: Servers, name: str) -> dict[str, float]:
    return servers.ranks.metrics(name, by="rank")[name]


def test_tokens_of_two_ranks_equal_one_stock_servers_alone_and_four_at_once(servers: Servers) -> None:
    asked = [english(length, start=1000 * i) for i, length in enumerate(LENGTHS)]
    expected = [servers.stock.complete(prompt, TOKENS) for prompt in asked]
    assert [servers.ranks.complete(prompt, TOKENS) for prompt in asked] == expected
    assert servers.ranks.complete_all(asked, TOKENS) == expected
    deadline = time.monotonic() + 60
    while True:  # each rank publishes by itself, at most every half second, after a step
        servers.ranks.complete("One more.", 1)
        by_cpu = by_rank(servers, "hybrid_cpu_tokens_total")
        if by_cpu.keys() == {"0", "1"} and by_cpu["0"] == by_cpu["1"] > 0:
            return
        assert time.monotonic() < deadline, f"not both ranks' workers have their part: {by_cpu}"
        time.sleep(0.6)


def test_clients_that_leave_two_ranks_leave_nothing_behind(servers: Servers) -> None:
    """Survivors answer as if alone; afterwards no frame is in use."""
    lengths = (8, 40, 150, 300)
    abort_storm(servers.ranks, lengths, aborted_length=500, aborted_tokens=200, survivors=16, aborted=12)
    assert by_rank(servers, "hybrid_frames_in_use") == {"0": 0, "1": 0}
    assert "Traceback" not in servers.ranks.log.read_text()
