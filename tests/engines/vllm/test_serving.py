"""What users of the engine expect keeps working, with the model traced as a graph.

Inductor, which would then take minutes to compile it, is left out, as vLLM's own CPU tests do; test_compiled.py has it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from hybrid_backend.config import find_config, load_config
from hybrid_backend.tools.bench.load import WARM_UP, Point
from hybrid_backend.tools.status import MIDDLEWARE
from hybrid_backend.tools.status.app import PAGE
from tests.engines import ends, promises
from tests.engines.server import API_KEY, MODEL, Server, executable, hybrid_server
from tests.engines.storm import abort_storm
from tests.engines.texts import english
from tests.unit.status.test_app import status_of

pytestmark = pytest.mark.engine
GREEDY = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--dtype", "float32", "--no-enforce-eager", "--max-num-seqs", "32", "--max-model-len", "4096"]
    flags += ["--middleware", MIDDLEWARE, "--api-key", API_KEY]
    flags += ["--shutdown-timeout", "240"]  # a busy machine answers slowly
    config = {
        "host_pool.size": "512MiB",
        "method": "scout",
        "frames_per_request": 80,
        "lookahead.partial_query": "predicted",
    }
    # A folder for temporary files of its own, because other servers may run; a short one, because sockets live in it.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="t") as folder:
        patch.setenv("VLLM_CPU_CI_ENV", "1")
        patch.setenv("TMPDIR", folder)
        with hybrid_server(tmp_path_factory.mktemp("serving"), config, flags) as running:
            patch.undo()
            children = psutil.Process(running.process.pid).children(recursive=True)
            assert children and list(Path(folder).glob("hybrid-*"))
            yield running
        # A stopped server leaves no process and no file. The last process sees that its parent is gone a moment later.
        assert running.process.returncode == 0
        alive = psutil.wait_procs(children, timeout=20)[1]
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
        assert not list(Path(folder).glob("hybrid-*"))


def test_the_log_says_once_what_serves(server: Server) -> None:
    promises.what_serves_is_said_once(server, "scout", load_config(find_config(MODEL)).budget_tokens)


def test_a_chat_completion_streams(server: Server) -> None:
    promises.a_chat_completion_streams(server)


def test_several_samples_share_their_prompt_and_differ(server: Server) -> None:
    answer = server.client().completions.create(
        model=server.model, prompt=english(300), n=4, temperature=1.0, max_tokens=GREEDY, seed=7
    )
    assert len({choice.text for choice in answer.choices}) == 4


def test_logprobs_are_those_of_a_distribution(server: Server) -> None:
    answer = server.client().completions.create(
        model=server.model, prompt=english(100), max_tokens=8, temperature=0, logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None and logprobs.token_logprobs is not None
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen is not None and chosen <= 0 and chosen >= max(top.values()) - 1e-3


def test_the_lookahead_runs_inside_the_traced_model(server: Server) -> None:
    config = load_config(find_config(MODEL))
    predicted = {layer for layer in range(1, 30) if config.is_predicted(layer)}
    promises.the_cpu_starts_a_layer_ahead(
        server, predicted, set(range(30)) - predicted, lambda: server.complete(english(2500), 96)
    )
    assert server.total("hybrid_cpu_tokens_total") > 0


def test_the_status_page_in_the_server_shows_what_it_does(server: Server) -> None:
    prompt = english(2500)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.complete, prompt, 256) for _ in range(2)]
        assert httpx.get(f"{server.url}/v1/models").status_code == 401, "the engine's own rules still hold"
        assert "hybrid status" in httpx.get(server.url + PAGE).text
        running = []
        while not all(answer.done() for answer in asked):
            running += [column.running for column in status_of(server.url).columns]
            time.sleep(0.5)
    assert all(answer.result() for answer in asked)
    time.sleep(2.5)
    status = status_of(server.url)
    assert max(value or 0 for value in running) >= 2
    assert status.problem is None and status.engine == "vllm" and len(status.layers) == 30
    assert status.layers[10].residency is not None and 0 < status.layers[10].residency <= 1
    assert status.layers[10].cpu_ratio is not None and 0 < status.layers[10].cpu_ratio < 1
    assert status.figures["host_pool_pages"] and status.figures["device_bytes"]


def test_vllms_own_benchmark_client_measures_the_server(server: Server, tmp_path: Path, model_dir: Path) -> None:
    """The command line of the throughput bench as a user writes it."""
    before = server.total("vllm:request_success_total")
    command = [executable("hybrid"), "bench", "throughput", f"hybrid={server.url}", "--tokenizer", str(model_dir)]
    command += ["--out", str(tmp_path)]
    command += ["--rates", "inf", "--prompts", "4", "--input", "64", "--output", "8", "--repeats", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", API_KEY)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "throughput.json").read_text())
    points = [Point(**point) for point in record["points"]]
    assert [(p.endpoint, p.rate) for p in points] == [("hybrid", None)]
    assert all(p.completed == 4 and p.failed == 0 and p.ttft_median > 0 and p.tpot_median > 0 for p in points)
    counted = server.total("vllm:request_success_total") - before
    assert counted == 4 + WARM_UP, "the server answered what the bench says that it asked"
    assert "all at once" in done.stdout and "output tok/s" in done.stdout


def test_two_hundred_requests_with_random_aborts_leave_nothing_behind(server: Server) -> None:
    """Survivors answer as if alone; afterwards no frame is in use."""
    abort_storm(server, survivor_lengths=(8, 40, 150, 400), aborted_length=1600, aborted_tokens=400)


def test_the_log_has_no_error(server: Server) -> None:
    assert "Traceback" not in server.log.read_text()


def test_metrics_carry_every_promised_name(server: Server) -> None:
    assert server.metrics().keys() >= promises.METRICS


def test_sigterm_lets_requests_finish_and_leaves_nothing(server: Server) -> None:
    ends.a_signal_lets_requests_finish_and_leaves_nothing(server, "vllm:num_requests_running", signal.SIGTERM)
