"""What users of the engine expect keeps working, with the model traced as a graph.

Inductor, which would then take minutes to compile it, is left out, as vLLM's own CPU tests do; test_compiled.py has it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine import promises
from tests.engine.server import Server, hybrid_server
from tests.engine.storm import abort_storm
from tests.engine.texts import english

pytestmark = pytest.mark.engine
GREEDY = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--dtype", "float32", "--max-num-seqs", "32", "--max-model-len", "4096"]
    config = {
        "host_pool.size": "512MiB",
        "tiers": "separate",
        "slots_per_request": 80,
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
    server.complete(english(2500), 96)
    assert server.total("hybrid_cpu_tokens_total") > 0
    assert server.total("hybrid_lead_seconds_total") > 0, "no CPU partial started ahead"


def test_two_hundred_requests_with_random_aborts_leave_nothing_behind(server: Server) -> None:
    """Survivors answer as if alone; afterwards no region, slot or recall is in use."""
    abort_storm(server, survivor_lengths=(8, 40, 150, 400), aborted_length=1600, aborted_tokens=400)


def test_the_log_has_no_error(server: Server) -> None:
    assert "Traceback" not in server.log.read_text()


def test_metrics_carry_every_promised_name(server: Server) -> None:
    assert server.metrics().keys() >= promises.METRICS
