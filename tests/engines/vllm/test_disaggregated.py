"""Beyond one process, by vLLM's own means: prompts on one server and answers on another; replicas.

A stock server computes prompts, hands their KV over by one of vLLM's connectors, and says what is right. A hybrid
server decodes: two replicas of it, through files; one, through NIXL, whose threads and vLLM's that wait for them never
sleep, so that each server has a core of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.engines.promises import nothing_is_left
from tests.engines.server import MODEL, Server, all_of, executable, free_port, hybrid_server, running, stock_server
from tests.engines.texts import english
from tests.support.models import write_llama

pytestmark = pytest.mark.engine

PAGE, TOKENS = 32, 12
# One token less than whole pages, as many, one and two more.
LENGTHS = (5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 2, 130, 333)
LONG = (900, 1000)
KEYS = {
    "page_size": PAGE,
    "method": "scout",
    "frames_per_request": 12,  # 384 tokens; of longer ones 256 are attended
    "budget_tokens": 256,
    "exact_layers": [0],
    # While loaded pages are on their way to the frames, the CPU attends them: with the true query, what a server
    # attends does not depend on where its pages lie.
    "lookahead.partial_query": "real",
    "host_pool.size": "64MiB",
}
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4")
LOADED, HELD = "vllm:external_prefix_cache_hits_total", "vllm:kv_cache_usage_perc"
KINDS = (
    "files",
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(
            not os.environ.get("HYBRID_TEST_NIXL"),
            reason="NIXL's threads take whole cores: alone, with HYBRID_TEST_NIXL=1 (make test-nixl)",
        ),
    ),
)


class Servers(NamedTuple):
    kind: str
    prefill: Server
    decoding: Server
    folder: Path

    def hand_over(self, prompt: str) -> dict[str, Any]:
        """The prefill server computes a prompt. Returns what the decoding server must be told with it."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False} if self.kind == "nixl" else None
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": asked}
        answer = httpx.post(f"{self.prefill.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
        return {"kv_transfer_params": answer["kv_transfer_params"]} if self.kind == "nixl" else {}

    def through(self, prompt: str, tokens: int = TOKENS) -> str:
        return self.decoding.complete(prompt, tokens, extra_body=self.hand_over(prompt))


def prompts(lengths: Sequence[int], start: int) -> list[str]:
    return [english(length, start=start + 1000 * i) for i, length in enumerate(lengths)]


@pytest.fixture(scope="module", params=KINDS)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[Servers]:
    """One connector after the other: NIXL's threads never sleep."""
    kind: str = request.param
    logs, folder = tmp_path_factory.mktemp(f"logs-{kind}"), tmp_path_factory.mktemp("kv")
    model = write_llama(tmp_path_factory.mktemp("model"), model_dir)

    def connector(role: str) -> str:
        if kind == "nixl":
            # Longer than a server may be late here: what is read after the lease has ended is another prompt's.
            extra: dict[str, Any] = {"kv_lease_duration": 60}
            return json.dumps({"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra})
        extra = {"shared_storage_path": str(folder)}
        return json.dumps({"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": extra})

    def environment(core: int | None) -> dict[str, str]:
        own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_SERVER_DEV_MODE": "1"}
        own["VLLM_CPU_NUM_OF_RESERVED_CPU"] = ""  # None: which cores a rank computes on is left to `hybrid serve`
        return own if core is None else own | {"VLLM_CPU_OMP_THREADS_BIND": str(core)}

    giving = (*FLAGS, "--block-size", str(PAGE), "--kv-cache-memory-bytes", str(64 * 2**20))
    giving += ("--kv-transfer-config", connector("kv_producer"))
    if kind == "files":  # what vLLM's connector through files asks for (docs/guides/disaggregate.md)
        giving += ("--no-enable-prefix-caching", "--max-num-batched-tokens", "8192")
    taking = (*FLAGS, "--served-model-name", MODEL, "--kv-transfer-config", connector("kv_consumer"))
    cores = sorted(os.sched_getaffinity(0))
    if kind == "files":
        taking += ("--data-parallel-size=2",)
    starts = [
        # vLLM's NIXL worker binds its main thread to the last core, where a second thread would wait for it in vain.
        stock_server(logs, model, giving, environment(cores[0])),
        hybrid_server(logs, KEYS, taking, str(model), environment=environment(cores[-1] if kind == "nixl" else None)),
    ]
    with all_of(starts) as (prefill, decoding):
        yield Servers(kind, prefill, replace(decoding, model=MODEL), folder)


def test_tokens_of_prompts_that_a_stock_server_computed_equal_its_own(servers: Servers) -> None:
    decoding, asked = servers.decoding, prompts(LENGTHS, 0)
    before = decoding.total(LOADED)
    answers = [servers.through(prompt) for prompt in asked]
    assert answers == [servers.prefill.complete(prompt, TOKENS) for prompt in asked]
    # Files hold whole pages, without the last token.
    left_out = sum(min(length, PAGE + 1) if servers.kind == "files" else 0 for length in LENGTHS)
    assert decoding.total(LOADED) - before > 0.95 * sum(LENGTHS) - left_out, "prompts were computed, not loaded"


def test_four_at_once_with_prefix_hits_equal_the_stock_servers(servers: Servers) -> None:
    """Prompts that begin alike: pages of the prefix cache beside loaded ones. (Files are read over cached pages.)"""
    begin = english(200, start=16000)
    asked = [begin + prompt for prompt in prompts((10, 40, 64, 90, 110, 130), 17000)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: servers.through(prompt), asked))
    assert answers == [servers.prefill.complete(prompt, TOKENS) for prompt in asked]
    decoding = servers.decoding
    assert decoding.complete_all(asked, TOKENS) == answers
    nothing_is_left(decoding)


def test_sparse_answers_are_those_of_a_server_that_computed_the_prompt_itself(servers: Servers) -> None:
    """Digests and frames of loaded pages are those of computed ones."""
    decoding = servers.decoding
    for prompt in prompts(LONG, 10000):
        decoding.http().post(f"{decoding.url}/reset_prefix_cache").raise_for_status()
        on_cpu, loaded = decoding.total("hybrid_cpu_tokens_total"), decoding.total(LOADED)
        alone = decoding.complete(prompt, 2 * TOKENS)
        assert decoding.total("hybrid_cpu_tokens_total") > on_cpu, "nothing was left to the CPU: nothing is shown"
        assert decoding.total(LOADED) == loaded
        decoding.http().post(f"{decoding.url}/reset_prefix_cache").raise_for_status()
        assert servers.through(prompt, 2 * TOKENS) == alone
        assert decoding.total(LOADED) > loaded + 0.9 * min(LONG)


def test_clients_that_leave_in_the_middle_leave_nothing_behind(servers: Servers) -> None:
    """At once (NIXL may be reading), and in mid-answer; nor does the prefill server keep anything for them."""
    decoding = servers.decoding
    asked = prompts((250, 800, 900, 650), 28000)  # the first one fits: it equals the stock server's
    expected = servers.prefill.complete(asked[0], TOKENS)

    def leaves(prompt: str, seconds: float, lines: int) -> bool:
        """Gone after so many seconds without a word, or lines of the answer; returns whether it had those."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2000, "stream": True, "ignore_eos": True}
        body |= servers.hand_over(prompt)
        timeout = httpx.Timeout(60, read=seconds)
        try:
            with httpx.stream("POST", f"{decoding.url}/v1/completions", json=body, timeout=timeout) as stream:
                for count, _ in enumerate(stream.iter_lines(), start=1):
                    if count == lines:
                        return True
        except httpx.ReadTimeout:
            return False
        raise AssertionError("it was answered to the end")

    with ThreadPoolExecutor(3) as pool:
        gone = [
            pool.submit(leaves, prompt, seconds, lines)
            for prompt, seconds, lines in zip(asked[1:], (0.001, 0.1, 60.0), (1, 1000, 7), strict=True)
        ]
        assert servers.through(asked[0]) == expected, "whoever stays is answered as if alone"
    assert gone[2].result(), "it left in mid-answer"
    for each in gone:
        each.result()
    nothing_is_left(decoding)
    deadline = time.monotonic() + 90
    while held := decoding.total(HELD) + servers.prefill.total(HELD):
        assert time.monotonic() < deadline, f"blocks are held: {held}"
        decoding.complete_all(["One more."] * 4, 1)  # what is over is told in a step, of each replica
        servers.prefill.complete("One more.", 1)
        time.sleep(0.5)


@pytest.mark.parametrize("servers", ["files"], indirect=True)
def test_kv_that_cannot_be_read_fails_its_request_only_and_a_decoding_server_writes_none(servers: Servers) -> None:
    before = set(servers.folder.iterdir())
    servers.decoding.complete(english(200, start=33000), 2)
    assert set(servers.folder.iterdir()) == before, "it computed this one itself"
    broken = english(210, start=34000)
    servers.hand_over(broken)
    (written,) = set(servers.folder.iterdir()) - before
    sorted(written.iterdir())[1].write_bytes(b"cut off")
    body = {"model": MODEL, "prompt": broken, "max_tokens": 2}
    assert httpx.post(f"{servers.decoding.url}/v1/completions", json=body, timeout=60).status_code == 500
    whole = english(220, start=35000)
    assert servers.through(whole) == servers.prefill.complete(whole, TOKENS)
    nothing_is_left(servers.decoding)


@pytest.mark.parametrize("servers", ["files"], indirect=True)
def test_both_replicas_have_their_part(servers: Servers) -> None:
    """Of what the tests above asked for."""
    decoding = servers.decoding
    attended = decoding.metrics("hybrid_selected_tokens_total", by="rank")["hybrid_selected_tokens_total"]
    assert attended.keys() == {"0", "1"} and all(attended.values()), attended
    assert "each rank computes on cores of its own" in decoding.log.read_text()


@pytest.mark.parametrize("servers", KINDS[1:], indirect=True)
def test_vllms_router_sends_prompts_to_one_server_and_answers_from_the_other(servers: Servers, tmp_path: Path) -> None:
    port, metrics = free_port(), free_port()
    command = [executable("vllm-router"), "--vllm-pd-disaggregation", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--prefill", servers.prefill.url, "--decode", servers.decoding.url, "--policy", "round_robin"]
    command += ["--kv-connector", "nixl", "--prometheus-port", str(metrics)]
    asked, before = prompts((90, 240), 36000), servers.decoding.total(LOADED)
    with running(command, port, tmp_path / "router.log") as router:
        assert router.complete_all(asked, TOKENS) == [servers.prefill.complete(prompt, TOKENS) for prompt in asked]
    assert servers.decoding.total(LOADED) - before >= 300
