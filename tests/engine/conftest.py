"""Shared by the engine tests: the demo model, and answers of the stock engine, each server started once a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybrid_backend.hub import fetch
from tests.engine.server import MODEL, Server, stock_server
from tests.engine.texts import english

ROOT = Path(__file__).parents[2]
# fp32 KV of the demo model: 46,080 bytes per token. 364 MiB hold 8,283 tokens (517 pages of 16): one whole context.
POOL = 364 * 2**20
LENGTHS = (5, 17, 64, 120, 200, 333, 500, 700, 1000, 1500, 2000, 6950)
TOKENS = 24
# Four prompts of 125 pages nearly fill the pool; their answers need 32 pages more: somebody must go.
CROWD_LENGTH, CROWD_TOKENS = 1990, 128


class StockAnswers:
    """Greedy fp32 answers of the engine without our plugin, one prompt at a time, each asked for once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[tuple[str, int], str] = {}

    def to(self, prompts: Sequence[str], tokens: int, ignore_eos: bool = False) -> list[str]:
        for prompt in prompts:
            if (prompt, tokens) not in self._known:
                options = {"extra_body": {"ignore_eos": ignore_eos}}
                self._known[prompt, tokens] = self._server.complete(prompt, tokens, **options)
        return [self._known[prompt, tokens] for prompt in prompts]


def fp32_prompts() -> list[str]:
    return [english(length, start=2500 * i) for i, length in enumerate(LENGTHS)]


def fp32_crowd() -> list[str]:
    return [english(CROWD_LENGTH, start=1000 + 5000 * i) for i in range(4)]


@pytest.fixture(scope="session")
def stock_fp32(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[StockAnswers]:
    flags = ["--dtype", "float32", "--max-num-seqs", "4", "--enforce-eager"]
    flags += ["--kv-cache-memory-bytes", str(POOL), "--block-size", "32"]
    with stock_server(tmp_path_factory.mktemp("stock-fp32"), model_dir, flags) as server:
        yield StockAnswers(server)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return fetch(MODEL)


@pytest.fixture(scope="session", autouse=True)
def _importable_bench() -> Iterator[None]:
    """Servers import `bench.teacher` from the root of the repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


def all_at_once(server: Server, prompts: list[str], tokens: int, at_once: int = 4) -> list[str]:
    """Greedy completions, ``at_once`` requests in flight."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: server.complete(prompt, tokens), prompts))
