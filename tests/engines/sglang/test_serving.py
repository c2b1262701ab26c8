"""Under pressure: separate tiers with few frames, a small pool, the lookahead. What is long is sparse, what fits stays
exact, and whatever requests do, nothing of them stays."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from hybrid_backend.config import find_config, load_config
from hybrid_backend.tools.status.reading import read
from tests.engines import ends, promises
from tests.engines.answers import StockAnswers
from tests.engines.server import MODEL, Server
from tests.engines.sglang.server import PAGE, hybrid_server
from tests.engines.sglang.suite import BYTES_PER_TOKEN, next_tokens
from tests.engines.storm import abort_storm
from tests.engines.texts import english

pytestmark = pytest.mark.engine

SLOTS = 80  # 1,280 tokens: what is longer is attended under the budget
POOL_PAGES = 512
# SGLang's own switch for testing retraction: whenever several requests run, one of them must go at every 20th step.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
CROWD, CROWD_TOKENS, CROWD_LENGTH = 4, 40, 300
SPARSE_STARTS = (0,)
SPARSE_CONTEXT, SPARSE_TOKENS = 3000, 12
CONFIG = load_config(find_config(MODEL))
EXACT_LAYERS = set(CONFIG.exact_layers)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {
        "method": "scout",
        "frames_per_request": SLOTS,
        "budget_tokens": 1024,
        "selection.digest": "codes",
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


def test_the_pool_is_the_host_budget(server: Server) -> None:
    """SGLang keeps one page more, into which it writes what nobody reads."""
    assert server.total("hybrid_host_pool_pages") == POOL_PAGES + 1


def test_the_log_says_once_what_serves(server: Server) -> None:
    promises.what_serves_is_said_once(server, "scout", 1024)


def test_a_chat_completion_streams(server: Server) -> None:
    promises.a_chat_completion_streams(server)


def long_prompts() -> list[str]:
    return [english(SPARSE_CONTEXT, start=start) for start in SPARSE_STARTS]


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
    assert {int(layer) for layer in cosine} == {layer for layer in range(1, 30) if CONFIG.is_predicted(layer)}
    assert min(cosine.values()) > 0.8


def test_retracted_requests_answer_as_if_alone(server: Server) -> None:
    crowd = [english(CROWD_LENGTH, start=1000 + 5000 * i) for i in range(CROWD)]
    options = {"extra_body": {"ignore_eos": True}}
    alone = [server.complete(prompt, CROWD_TOKENS, **options) for prompt in crowd]
    before = server.total("sglang:num_retracted_requests_total")
    assert server.complete_all(crowd, CROWD_TOKENS, CROWD, **options) == alone
    assert server.total("sglang:num_retracted_requests_total") > before, "nothing was retracted: this shows nothing"
    for gauge in promises.NOTHING_LEFT[:2]:
        assert server.total(gauge) == 0, gauge


def test_a_storm_of_aborts_leaves_nothing_behind(server: Server) -> None:
    """Survivors answer as if alone, while clients of long (so sparse) requests that share pages go away."""
    abort_storm(server, (8, 40, 150, 400), aborted_length=1600, aborted_tokens=400, survivors=40, aborted=24)


def test_the_status_page_counts_tokens_of_requests_that_are_not_streamed_while_they_run(server: Server) -> None:
    """SGLang's own total of generated tokens stands still until a request ends."""
    prompts, counts, finished = [english(150, start=9000 * i) for i in range(3)], set(), set()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(server.complete, prompt, 80, extra_body={"ignore_eos": True}) for prompt in prompts]
        while not any(answer.done() for answer in answers):
            reading = read(httpx.get(f"{server.url}/metrics", timeout=60, verify=False).text, time.time())
            counts.add(reading.get("generated_tokens"))
            finished.add(server.total("sglang:generation_tokens_total"))
            time.sleep(0.2)
    print(f"\ngenerated, as the page counts: {sorted(counts)}; as finished requests: {finished}")
    assert len(counts) > 3 and max(counts) - min(counts) > 40


def test_metrics_carry_every_promised_name(server: Server) -> None:
    assert server.metrics().keys() >= promises.METRICS


def test_the_log_has_no_error(server: Server) -> None:
    assert not re.findall(r"Traceback|EngineError|Failed to apply hooks", server.log.read_text())


def test_ctrl_c_lets_requests_finish_and_leaves_nothing(server: Server) -> None:
    ends.a_signal_lets_requests_finish_and_leaves_nothing(server, "sglang:num_running_reqs", signal.SIGINT)
