"""Under pressure: separate tiers with few slots, a small pool, the lookahead. What is long is sparse, what fits stays
exact, and whatever requests do, nothing of them stays."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from hybrid_backend.config import find_config, load_config
from tests.engine.answers import StockAnswers
from tests.engine.server import MODEL, Server
from tests.engine.texts import english
from tests.engine_sglang.conftest import (
    BYTES_PER_TOKEN,
    SPARSE_TOKENS,
    all_at_once,
    long_prompts,
    next_tokens,
)
from tests.engine_sglang.server import PAGE, hybrid_server

pytestmark = pytest.mark.engine

SLOTS = 80  # 1,280 tokens: what is longer is attended under the budget
POOL_PAGES = 512
# SGLang's own switch for testing retraction: whenever several requests run, one of them must go at every 20th step.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
CROWD, CROWD_TOKENS, CROWD_LENGTH = 4, 64, 300
SURVIVORS, ABORTED, GREEDY = 40, 24, 12
EXACT_LAYERS = set(load_config(find_config(MODEL)).exact_layers)
NOTHING_LEFT = ("hybrid_regions_in_use", "hybrid_slots_in_use", "hybrid_recalls_in_flight")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {
        "tiers": "separate",
        "slots_per_request": SLOTS,
        "budget_tokens": 1024,
        "host_pool.size": POOL_PAGES * PAGE * BYTES_PER_TOKEN,
        "lookahead.partial_query": "predicted",
        "metrics.sample_interval": 8,
    }
    flags = ["--dtype", "float32", "--max-running-requests", "16"]
    with hybrid_server(tmp_path_factory.mktemp("serving"), config, flags, RETRACT) as running:
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert children
        yield running
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, f"still running after the server ended: {alive}"


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


def test_sparse_answers_stay_near_torch_native_s(server: Server, stock: StockAnswers) -> None:
    """A third of each context is attended. The first token follows from the prompt, which is exact."""
    names = ("hybrid_cpu_tokens_total", "hybrid_recalled_pages_total", "hybrid_lead_seconds_total")
    for prompt in long_prompts():
        expected = stock.once([prompt, "steps"], lambda other, text=prompt: next_tokens(other, text, SPARSE_TOKENS))
        ours = next_tokens(server, prompt, len(expected))
        for step, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
            likeliest = max(theirs, key=lambda token: theirs[token])
            lost = theirs[likeliest] - mine.get(likeliest, -100.0)
            print(f"\nstep {step}: the log-probability of {likeliest!r} falls by {lost:.3f}")
            assert lost < 1.0
            if max(mine, key=lambda token: mine[token]) != likeliest:
                break  # from here on the two continue different texts
    for name in names:
        assert server.total(name) > 0, f"{name}: the CPU workers had nothing to do"


def test_the_lookahead_predicts_and_the_selection_finds_the_mass(server: Server) -> None:
    by_layer = server.metrics("hybrid_attention_mass_recall")["hybrid_attention_mass_recall"]
    mass = [value for layer, value in by_layer.items() if int(layer) not in EXACT_LAYERS]
    cosine = server.metrics("hybrid_predicted_query_cosine")["hybrid_predicted_query_cosine"]
    print(f"\nmass recall {sum(mass) / len(mass):.3f}, worst layer {min(mass):.3f}")
    print(f"cosine of predicted queries {sum(cosine.values()) / len(cosine):.3f}, worst {min(cosine.values()):.3f}")
    assert sum(mass) / len(mass) >= 0.90
    assert min(cosine.values()) > 0.8


def test_retracted_requests_answer_as_if_alone(server: Server) -> None:
    crowd = [english(CROWD_LENGTH, start=1000 + 5000 * i) for i in range(CROWD)]
    options = {"extra_body": {"ignore_eos": True}}
    alone = [server.complete(prompt, CROWD_TOKENS, **options) for prompt in crowd]
    before = server.total("sglang:num_retracted_requests_total")
    assert all_at_once(server, crowd, CROWD_TOKENS, CROWD, **options) == alone
    assert server.total("sglang:num_retracted_requests_total") > before, "nothing was retracted: this shows nothing"
    for gauge in NOTHING_LEFT[:2]:
        assert server.total(gauge) == 0, gauge


def test_a_storm_of_aborts_leaves_nothing_behind(server: Server) -> None:
    """Survivors answer as if alone, while clients of long (so sparse) requests that share pages go away."""
    rng = random.Random(1)
    prompts = [english(rng.choice((8, 40, 150, 400)), start=rng.randrange(20000)) for _ in range(8)]
    expected = {prompt: server.complete(prompt, GREEDY) for prompt in prompts}

    def survivor(prompt: str) -> tuple[str, str]:
        return prompt, server.complete(prompt, GREEDY)

    def aborted(delay: float) -> None:
        body = {"model": server.model, "max_tokens": 400, "stream": True, "ignore_eos": True}
        body["prompt"] = english(1600, start=int(delay) * 5000)
        with httpx.Client(timeout=300) as client, client.stream("POST", f"{server.url}/v1/completions", json=body) as r:
            r.raise_for_status()
            until = time.monotonic() + delay
            for _ in r.iter_lines():
                if time.monotonic() > until:
                    return

    with ThreadPoolExecutor(SURVIVORS + ABORTED) as pool:
        leaving = [pool.submit(aborted, rng.uniform(0, 2)) for _ in range(ABORTED)]
        staying = [pool.submit(survivor, rng.choice(prompts)) for _ in range(SURVIVORS)]
        for job in leaving:
            job.result(timeout=600)
        answers = [job.result(timeout=600) for job in staying]
    wrong = [(prompt, text) for prompt, text in answers if expected[prompt] != text]
    assert not wrong, f"{len(wrong)} survivors answered differently, first: {wrong[0]!r}"
    deadline = time.monotonic() + 60
    while True:
        server.complete("One more.", 2)  # its steps see that copies under way have ended
        left = {gauge: server.total(gauge) for gauge in NOTHING_LEFT}
        if not any(left.values()):
            break
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(1)


def test_metrics_carry_every_promised_name(server: Server) -> None:
    promised = {
        "hybrid_selected_tokens_total", "hybrid_cpu_tokens_total", "hybrid_resident_hit_ratio",
        "hybrid_recalled_pages_total", "hybrid_wait_seconds_total", "hybrid_predicted_query_cosine",
        "hybrid_attention_mass_recall", "hybrid_slots_in_use", "hybrid_regions_in_use", "hybrid_host_pool_pages",
    }  # fmt: skip
    assert promised <= server.metrics().keys()


def test_the_log_has_no_error(server: Server) -> None:
    assert not re.findall(r"Traceback|EngineError|Failed to apply hooks", server.log.read_text())
