"""As `make serve` starts it: compiled, bf16, unified tiers, native in-place decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fidelity import FIDELITY_FLAGS, compare, follow
from tests.engine.server import Server, hybrid_server, stock_server
from tests.engine.texts import tokens_of_prose

pytestmark = pytest.mark.engine
FLAGS = ("--max-num-seqs", "4", "--max-model-len", "4096", *FIDELITY_FLAGS)
SHORT = (40, 300, 900, 1700)  # dense: within the shipped budget of 2048


def followed(server: Server) -> list[list[dict[int, float]]]:
    return [follow(server, tokens_of_prose(n, 900 * n), tokens_of_prose(24, 901 * n)) for n in SHORT]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> list[list[dict[int, float]]]:
    flags = [*FLAGS, "--kv-cache-memory-bytes", str(2**28), "--enforce-eager"]  # compiling would take a minute more
    with stock_server(tmp_path_factory.mktemp("stock"), model_dir, flags) as server:
        return followed(server)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with hybrid_server(tmp_path_factory.mktemp("compiled"), {"host_pool.size": "256MiB"}, FLAGS) as running:
        yield running


def test_distributions_equal_the_stock_backends(server: Server, dense: list[list[dict[int, float]]]) -> None:
    compared = [compare(a, b) for a, b in zip(dense, followed(server), strict=True)]
    kl = sum(c.kl for c in compared) / len(compared)
    print(f"\nbf16, compiled: KL of hybrid against stock {kl:.2e}")
    assert kl <= 2e-3


def test_a_chat_completion_streams(server: Server) -> None:
    stream = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 3, "the answer came in one piece"
    assert "Paris" in "".join(pieces)
