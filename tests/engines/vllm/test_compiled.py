"""Compiled, in bf16, with method quest: native decoding in place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybrid_backend.tools.bench.fidelity import FIDELITY_FLAGS, compare
from tests.engines import ends, promises
from tests.engines.answers import StockAnswers
from tests.engines.server import Server, hybrid_server
from tests.engines.vllm.distributions import short_distributions

pytestmark = pytest.mark.engine
# In chunks: a warm-up of thousands of tokens takes long on CPUs without bf16 instructions.
FLAGS = ("--dtype", "bfloat16", "--no-enforce-eager", "--max-num-seqs", "4", "--max-model-len", "4096")
FLAGS += ("--max-num-batched-tokens", "512", *FIDELITY_FLAGS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with hybrid_server(tmp_path_factory.mktemp("compiled"), {"host_pool.size": "256MiB"}, FLAGS) as running:
        yield running


def test_distributions_equal_the_stock_backends(server: Server, stock: StockAnswers) -> None:
    """The texts are within the shipped budget of 2048, so they are dense: what is left is bf16's own rounding."""
    dense = stock.distributions("short", short_distributions)
    compared = [compare(a, b) for a, b in zip(dense, short_distributions(server), strict=True)]
    kl = sum(c.kl for c in compared) / len(compared)
    print(f"\nKL of hybrid, bf16, compiled, against stock, fp32, eager {kl:.2e}")
    assert kl <= 2e-3


def test_a_chat_completion_streams(server: Server) -> None:
    promises.a_chat_completion_streams(server)


def test_a_crash_of_a_worker_while_requests_drain_is_no_success(server: Server) -> None:
    ends.a_crash_while_requests_drain_is_no_success(server, "vllm:num_requests_running", "Worker")
