"""In place, as a CPU serves by default, where pages are left out: by codes, found again by the prefix cache, beside
others, and with a promise. (vLLM's beside preemption and aborts: tests/engines/vllm/test_in_place.py; here separate
tiers have those, test_serving.py.)"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines import ends, promises
from tests.engines.answers import StockAnswers
from tests.engines.server import Server
from tests.engines.sglang.server import hybrid_server
from tests.engines.sglang.suite import PREFIX_HITS, next_tokens
from tests.engines.texts import english

pytestmark = pytest.mark.engine

LENGTH, TOKENS, BUDGET = 1000, 12, 128
INTERVAL = 64
"""Steps between two rounds of samples: more than the first tests take, during which the budget stays as it is."""
KEYS = {
    "selection.digest": "codes",
    "budget_tokens": BUDGET,
    "quality.min_mass": 0.999,
    "metrics.sample_interval": INTERVAL,
    "host_pool.size": "256MiB",
}
PROMPTS = [english(LENGTH, start=4000 * i + 700) for i in range(3)]
SAME = 0.01
"""Nats by which the likeliest token's log-probability may move where the same pages are chosen."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--dtype", "float32", "--chunked-prefill-size", "1024", "--max-running-requests", "8"]
    with hybrid_server(tmp_path_factory.mktemp("in-place"), KEYS, flags) as running:
        yield running


Steps = list[dict[str, float]]


def asked(server: Server, prompt: str) -> Steps:
    return next_tokens(server, prompt, TOKENS)


def losses(expected: Steps, found: Steps) -> list[float]:
    """Of each position up to the first at which the two texts differ: by how much the expected token's log-probability
    is another one."""
    lost = []
    for theirs, mine in zip(expected, found, strict=True):
        likeliest = max(theirs, key=lambda token: theirs[token])
        lost.append(abs(theirs[likeliest] - mine.get(likeliest, min(mine.values()))))
        if max(mine, key=lambda token: mine[token]) != likeliest:
            break
    return lost


@pytest.fixture(scope="module")
def alone(server: Server) -> list[Steps]:
    """Each prompt for the first time, computed in chunks, with nobody beside it."""
    return [asked(server, prompt) for prompt in PROMPTS]


def test_an_eighth_of_the_context_chosen_by_codes_stays_near_torch_native(
    alone: list[Steps], stock: StockAnswers
) -> None:
    found = []
    for prompt, mine in zip(PROMPTS, alone, strict=True):
        expected = stock.once([prompt, TOKENS, "in place"], lambda other, text=prompt: asked(other, text))
        found.append(losses(expected, mine))
    print(f"\nby how much the likeliest token's log-probability differs: {found}")
    assert 1e-3 < max(map(max, found)) < 1.5, "next to 0: nothing was left out"
    assert all(each[0] < 1e-3 for each in found), "the first token follows from the prompt, which is exact"


def test_prefix_hits_and_rows_beside_others_choose_the_same_pages(server: Server, alone: list[Steps]) -> None:
    """Digests belong to pages of the host pool: whoever finds a page has its digest."""
    before = server.total(PREFIX_HITS)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: asked(server, prompt), PROMPTS))
    assert server.total(PREFIX_HITS) - before > 0.9 * LENGTH * len(PROMPTS), "not found again: this shows nothing"
    assert server.total("hybrid_quality_budget_tokens") == BUDGET, "the budget moved meanwhile: this shows nothing"
    moved = [losses(a, b) for a, b in zip(alone, together, strict=True)]
    print(f"\nmoved by {moved}")
    assert all(len(each) == TOKENS and max(each) < SAME for each in moved)


def test_the_budget_grows_until_the_promised_mass_is_kept(server: Server, stock: StockAnswers) -> None:
    """Prose needs nearly all of it for 0.999 of the mass: rows then answer as the stock backend does."""
    deadline = time.monotonic() + 300
    while (budget := server.total("hybrid_quality_budget_tokens")) < LENGTH + TOKENS:
        assert time.monotonic() < deadline, f"{budget} tokens still, mass {server.total('hybrid_quality_mass')}"
        server.complete_all(PROMPTS, 100, len(PROMPTS), extra_body={"ignore_eos": True})
        time.sleep(0.6)  # metrics are published at most every half second, after a step
        server.complete("One more.", 1)
    assert [server.complete(prompt, TOKENS) for prompt in PROMPTS] == stock.to(PROMPTS, TOKENS)
    assert math.isfinite(budget) and 0 < server.total("hybrid_quality_mass") < 1, "it grew by what was sampled"
    assert "Traceback" not in server.log.read_text()


def test_the_readmes_first_answer_is_right_each_time(server: Server) -> None:
    promises.the_readmes_first_answer_is_right_each_time(server)


def test_a_crashed_scheduler_is_no_success(server: Server) -> None:
    ends.a_crash_is_no_success(server, "scheduler")


def test_a_crash_of_the_scheduler_while_requests_drain_is_no_success(tmp_path: Path) -> None:
    with hybrid_server(tmp_path, KEYS, ["--dtype", "float32"]) as server:
        ends.a_crash_while_requests_drain_is_no_success(server, "sglang:num_running_reqs", "scheduler")
