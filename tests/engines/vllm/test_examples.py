"""The scripts of examples/ that ask a server, run as their readers run them, all on one server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import ROOT
from tests.engines.server import API_KEY, Server, hybrid_server
from tests.engines.texts import english

pytestmark = pytest.mark.engine
TOKENS = 1200  # of the document: fewer than in the scripts' own, so that CI does not wait


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--api-key", API_KEY]
    with hybrid_server(tmp_path_factory.mktemp("examples"), {"host_pool.size": "512MiB"}, flags) as running:
        yield running


def run(server: Server, script: str, *arguments: str, questions: str = "") -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", API_KEY)
        return subprocess.run(
            [sys.executable, ROOT / "examples" / script, "--url", f"{server.url}/v1", *arguments],
            input=questions,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("document") / "prose.txt"
    path.write_text(english(TOKENS))
    return str(path)


def printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_chat_keeps_what_was_said(server: Server) -> None:
    def prompt_tokens(turns: int) -> float:
        before = server.total("vllm:prompt_tokens_total")
        text = printed(run(server, "chat.py", questions="What is the capital of Japan?\n" * turns))
        assert text.count("Tokyo") >= turns
        return server.total("vllm:prompt_tokens_total") - before

    assert prompt_tokens(2) > 2 * prompt_tokens(1) + 5, "the second prompt holds no more than the question"


def test_the_second_question_about_a_document_finds_it_in_the_prefix_cache(server: Server, document: str) -> None:
    before = server.total("vllm:prefix_cache_hits_total")
    text = printed(run(server, "long_document.py", document, "Who speaks?", "Where are they?", "--max-tokens", "8"))
    first, second = map(float, re.findall(r"first token after ([\d.]+) s: .", text))
    assert server.total("vllm:prefix_cache_hits_total") - before > 0.9 * TOKENS
    assert second < first / 2


def test_requests_of_one_batch_have_budgets_of_their_own(server: Server, document: str) -> None:
    arguments = ["--prompt-file", document, "--max-tokens", "16", "--budgets", "64", "100000"]
    text = printed(run(server, "budgets.py", *arguments))
    sparse, exact, servers_own = re.findall(r"^budget (?:\d+|of the server): (.+)", text, re.MULTILINE)
    assert sparse != exact and servers_own


def test_a_sparse_answer_leaves_the_exact_one_where_the_budget_is_small(server: Server, document: str) -> None:
    arguments = ["--prompt-file", document, "--max-tokens", "16", "--exact-url", f"{server.url}/v1"]
    text = printed(run(server, "compare.py", *arguments, "--budget", "64"))
    exact, sparse = re.findall(r"^Then \w+: (.*), log-probability -?\d", text, re.MULTILINE)
    assert exact != sparse
    text = printed(run(server, "compare.py", *arguments, "--budget", "100000"))
    assert text.startswith("The same 16 tokens") and text.endswith("The answers do not differ.\n")


def test_a_refused_request_ends_a_script_with_one_line(server: Server, document: str, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 5000)
    for arguments, reason in (
        (["budgets.py", "--prompt-file", document, "--budgets", "0"], "budget_tokens"),
        (["long_document.py", str(tmp_path / "long.txt"), "What is it?"], "2048"),
    ):
        done = run(server, *arguments)
        assert done.returncode == 1, done.stdout + done.stderr
        assert re.fullmatch(rf"error: \S+ answers with status 400: .*{reason}.*\n", done.stderr), done.stderr
