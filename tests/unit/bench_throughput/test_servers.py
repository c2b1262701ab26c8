"""Servers that a measurement starts: one line says why one did not come up, and none is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench import servers
from hybrid_backend.tools.bench.client import BenchError
from hybrid_backend.tools.bench.servers import free_port, parse_overrides, running


def test_a_server_that_ends_is_quoted_with_its_own_reason_and_its_log(tmp_path: Path) -> None:
    says = "print('loading'); print('error: no key budget_token'); print('bye'); raise SystemExit(3)"
    log = tmp_path / "logs" / "server.log"
    with pytest.raises(BenchError) as refused, running([sys.executable, "-c", says], free_port(), "model", log):
        pytest.fail("it does not run")
    assert str(refused.value) == f"a server ended with 3: error: no key budget_token; its log: {log}"
    assert log.read_text().splitlines()[-1] == "bye"


def test_a_server_that_never_answers_is_given_up_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "START_DEADLINE", 0.2)
    before = set(psutil.Process().children(recursive=True))
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        pytest.raises(BenchError, match=r"does not answer 0.2 s after its start; its log: \S+server.log"),
        running(sleeps, free_port(), "model", tmp_path / "server.log"),
    ):
        pytest.fail("it does not answer")
    assert not set(psutil.Process().children(recursive=True)) - before


def test_overrides_are_read_as_hybrid_serve_reads_them() -> None:
    assert parse_overrides(["budget_tokens=1024", "recall.enabled=false"]) == {
        "budget_tokens": 1024,
        "recall.enabled": False,
    }
    with pytest.raises(ConfigError, match="--set"):
        parse_overrides(["recall.enable=false"])
