"""The prompts, and the fp32 answers of SGLang's torch_native backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.answers import StockAnswers, stock_answers
from tests.engine.server import Server
from tests.engine.texts import english
from tests.engine_sglang.server import PAGE, sglang_server

LENGTHS = (6, 17, 60, 120, 300, 700, 1500, 6950)
SPARSE_STARTS = (0,)
SPARSE_CONTEXT, SPARSE_TOKENS = 3000, 12
TOKENS = 16  # so that every answer begins a page
POOL_TOKENS = 15000
BYTES_PER_TOKEN = 46080  # fp32 KV of the demo model
FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "1024", "--max-running-requests", "8")


def prompts() -> list[str]:
    return [english(length, start=2500 * i) for i, length in enumerate(LENGTHS)]


def long_prompts() -> list[str]:
    return [english(SPARSE_CONTEXT, start=start) for start in SPARSE_STARTS]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[StockAnswers]:
    flags = ["--device", "cpu", "--attention-backend", "torch_native", "--page-size", str(PAGE), "--sleep-on-idle"]
    # In one piece: torch_native computes a chunk's whole prefix anew.
    flags += ["--max-total-tokens", str(POOL_TOKENS), *FLAGS, "--chunked-prefill-size", "8192"]
    with stock_answers(tmp_path_factory, "sglang", lambda folder: sglang_server(folder, model_dir, flags)) as answers:
        yield answers


def next_tokens(server: Server, prompt: str, tokens: int) -> list[dict[str, float]]:
    """Log-probabilities of the five likeliest tokens at each of ``tokens`` greedy steps."""
    answer = server.client().completions.create(
        model=server.model, prompt=prompt, max_tokens=tokens, temperature=0, logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    return [dict(top) for top in logprobs.top_logprobs if top is not None]
