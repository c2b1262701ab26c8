"""Shared by the engine tests: the prompts, and the answers of the engine without our plugin in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fidelity import FIDELITY_FLAGS, follow
from tests.engine.answers import StockAnswers, stock_answers
from tests.engine.server import Server, stock_server
from tests.engine.texts import english, tokens_of_prose

ROOT = Path(__file__).parents[2]
# fp32 KV of the demo model: 46,080 bytes per token. 364 MiB hold 8,283 tokens (517 pages of 16): one whole context.
POOL = 364 * 2**20
LENGTHS = (5, 17, 64, 120, 200, 333, 400, 500, 700, 900, 1200, 6950)
TOKENS = 16  # so that every answer begins a page
SHORT = (40, 300, 700)
# Four prompts of 128 pages nearly fill the pool; their answers need 8 pages more: somebody must go.
CROWD_LENGTH, CROWD_TOKENS = 2040, 32


def fp32_prompts() -> list[str]:
    return [english(length, start=2500 * i) for i, length in enumerate(LENGTHS)]


def fp32_crowd() -> list[str]:
    return [english(CROWD_LENGTH, start=1000 + 5000 * i) for i in range(4)]


@pytest.fixture(scope="session")
def stock_fp32(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[StockAnswers]:
    flags = ["--dtype", "float32", "--max-num-seqs", "4", "--enforce-eager", *FIDELITY_FLAGS]
    flags += ["--kv-cache-memory-bytes", str(POOL), "--block-size", "32"]
    with stock_answers(tmp_path_factory, "fp32", lambda folder: stock_server(folder, model_dir, flags)) as answers:
        yield answers


def short_distributions(server: Server) -> list[list[dict[int, float]]]:
    """Of the next token, at the positions of some texts that fit every budget of the tests."""
    return [follow(server, *_short(length)) for length in SHORT]


def _short(length: int) -> tuple[list[int], list[int]]:
    return tokens_of_prose(length, 900 * length), tokens_of_prose(24, 901 * length)


@pytest.fixture(scope="session", autouse=True)
def _importable_bench() -> Iterator[None]:
    """Servers import `bench.teacher` from the root of the repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield
