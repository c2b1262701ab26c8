"""APEX in vLLM: requests beyond the device's memory are attended by CPU workers, and their rows wait from one iteration
to the next. Whatever happens to them, fp32 tokens are those of the stock backend.

One process serves the demo model, stock and with apex (apex_probe.py), which the first test waits for; then
there is a server, unified and traced as a graph, over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engines import ends, promises
from tests.engines.probes import ROOT, Probe, run
from tests.engines.server import Server, hybrid_server
from tests.engines.texts import tokens_of_prose

pytestmark = pytest.mark.engine

LAYERS, PAGE, DEVICE_TOKENS = 30, 16, 96
STRATEGIES = ["gpu", "lockstep", "overlap", "auto", "switching"]
REST = ["fits", "prefix", "late", "overdue", "ended"]
NOISE = 1e-3  # fp32 sums in another order


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    return run(tmp_path_factory.mktemp("apex"), "vllm/apex_probe.py", *STRATEGIES, *REST, seconds=900, paths=[ROOT])


def assert_stock(seen: Probe, answers: dict[str, Any], asked: str) -> None:
    """Tokens, texts, why they ended, and log-probabilities."""
    stock = seen("stock")
    for name, own in answers.items():
        expected = stock[f"{asked}/{name}"]
        for key in ("tokens", "text", "reason"):
            assert [each[key] for each in own] == [each[key] for each in expected], f"{name}: {key}"
        for mine, theirs in zip(own, expected, strict=True):
            assert len(mine["logprobs"]) == len(theirs["logprobs"])
            for one, other in zip(mine["logprobs"], theirs["logprobs"], strict=True):
                assert one == pytest.approx(other, abs=NOISE), name


def assert_nothing_is_left(found: dict[str, Any]) -> None:
    assert not any(found["left"].values()), found["left"]


# --- the same tokens ---


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_greedy_sampled_stopped_and_structured_answers_equal_stock_s_with_some_requests_on_the_cpu(
    seen: Probe, strategy: str
) -> None:
    """Eleven at once; ``switching``: from overlap to lockstep and back, in the middle of tokens."""
    found = seen(strategy)
    assert_stock(seen, found["answers"], "mixed")
    stock = seen("stock")
    assert stock["mixed/stops"][0]["reason"] == "stop" and len(stock["mixed/two"]) == 2
    assert stock["mixed/choice"][0]["text"] in ("Jerusalem", "Egypt")
    assert all(len(place) >= 3 for place in stock["mixed/long"][0]["logprobs"])
    assert found["strategies"].keys() - {"gpu"} == {
        "gpu": set(), "lockstep": {"lockstep"}, "overlap": {"overlap"}, "auto": {"overlap", "lockstep"},
        "switching": {"overlap", "lockstep"},
    }[strategy]  # fmt: skip
    assert_nothing_is_left(found)


def test_requests_that_fit_on_the_device_stay_there_alone_and_four_at_once(seen: Probe) -> None:
    found = seen("fits")
    assert_stock(seen, found["alone"], "fits")
    assert_stock(seen, found["answers"], "fits")
    assert found["strategies"].keys() == {"gpu"} and len(found["alone"]) == len(found["answers"]) == 4
    assert_nothing_is_left(found)


# --- how many iterations ---


def test_requests_on_the_device_get_a_token_in_every_iteration_beside_rows_that_wait(seen: Probe) -> None:
    at = seen("overlap")["at"]
    assert at["here"] == at["here, seeded"] == list(range(24))


def test_a_token_on_the_cpu_takes_as_many_iterations_as_layers_and_one_and_a_late_worker_delays_its_own_row_only(
    seen: Probe,
) -> None:
    found = seen("late")
    assert found["told"] == {"here": 24, "late": 1, "in time": 3}
    assert found["at"]["here"] == list(range(24))
    assert found["at"]["in time"] == [0, LAYERS + 1, 2 * (LAYERS + 1)]
    assert found["at"]["late"][1] > 2 * (LAYERS + 1)
    assert_stock(seen, found["answers"], "late")
    assert_nothing_is_left(found)


def test_a_row_later_than_the_deadline_is_computed_again_and_ends_with_an_error_if_it_is_late_twice(
    seen: Probe,
) -> None:
    """``once`` is computed again as a part of its prompt, which asks no worker."""
    found = seen("overdue")
    assert sorted(found["recomputed"]) == ["once", "twice", "twice"]
    (failed,) = found["answers"].pop("twice")
    assert failed["reason"] == "error" and len(failed["tokens"]) == 1
    assert failed["tokens"] == seen("stock")["overdue/twice"][0]["tokens"][:1]
    assert_stock(seen, found["answers"], "overdue")
    assert_nothing_is_left(found)


# --- lives ---


def test_a_page_that_a_waiting_row_fills_is_in_the_prefix_cache_when_its_token_is_done_and_no_earlier(
    seen: Probe,
) -> None:
    found, filled = seen("prefix"), DEVICE_TOKENS + 2 * PAGE
    assert found["parked"] == LAYERS // 2
    assert found["is_cached"] == {"meanwhile": False, "before": False, "afterwards": True}
    assert (found["cached"]["meanwhile"], found["cached"]["afterwards"]) == (filled - PAGE, filled)
    assert_stock(seen, found["answers"], "prefix")
    assert_nothing_is_left(found)


def test_aborts_and_preemptions_at_the_first_middle_and_last_layer_leave_nothing_and_disturb_nobody(
    seen: Probe,
) -> None:
    found = seen("ended")
    assert {name: int(name.split()[1]) for name in found["parked"]} == found["parked"] and len(found["parked"]) == 6
    assert found["rows"] == 1, "the preempted ones are between two tokens again, the aborted ones are gone"
    answers = {name: answer for name, answer in found["answers"].items() if not name.startswith("aborted")}
    stays = {name: answers.pop(name) for name in ("stays", "here")}
    assert len(answers) == 3
    assert_stock(seen, answers, "ended")
    assert_stock(seen, stays, "stays")
    assert_nothing_is_left(found)


# --- over HTTP ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {"method": "apex", "apex.strategy": "overlap", "apex.device_tokens": DEVICE_TOKENS}
    flags = ["--dtype", "float32", "--no-enforce-eager", "--max-num-seqs", "8", "--max-model-len", "512"]
    flags += ["--max-num-batched-tokens", "512"]
    # Traced, without the minutes of Inductor (test_compiled.py); one thread, as in the probe.
    environment = {"VLLM_CPU_CI_ENV": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with hybrid_server(
        tmp_path_factory.mktemp("server"), {**keys, "host_pool.size": "128MiB"}, flags, environment=environment
    ) as running:
        yield running


def test_streams_over_http_come_in_order_and_equal_stock_s(seen: Probe, server: Server) -> None:
    """Three on the CPU and one on the device, traced."""
    stock = seen("stock")

    def stream(prompt: list[int], tokens: int) -> list[Any]:
        return list(
            server.client().completions.create(
                model=server.model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )
        )  # fmt: skip

    asked = {"here": (40, 24), "a": (180, 3), "b": (120, 3), "c": (200, 3)}
    prompts = {name: tokens_of_prose(length, 331 * length) for name, (length, _) in asked.items()}
    with ThreadPoolExecutor(len(asked)) as pool:
        streams = {name: pool.submit(stream, prompts[name], tokens) for name, (_, tokens) in asked.items()}
    for name, (length, tokens) in asked.items():
        *chunks, usage = streams[name].result()
        (expected,) = stock[f"served/{name}"]
        pieces = [chunk.choices[0].text for chunk in chunks]
        assert "".join(pieces) == expected["text"]
        assert len([piece for piece in pieces if piece]) > 2 and len(chunks) <= tokens + 1
        assert chunks[-1].choices[0].finish_reason == "length"
        assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (length, tokens)
    assert server.total("hybrid_cpu_tokens_total") > 0
    promises.nothing_is_left(server)
    assert server.total("hybrid_parked_rows") == 0
    assert "Traceback" not in server.log.read_text()


def test_a_crash_of_the_engine_core_while_requests_drain_is_no_success(server: Server) -> None:
    ends.a_crash_while_requests_drain_is_no_success(server, "vllm:num_requests_running", "EngineCore")
