"""Servers that a measurement starts: one line says why one did not come up, and none is left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench import servers
from hybrid_backend.tools.bench.client import BenchError
from hybrid_backend.tools.bench.servers import configured, free_port, interruptible, parse_overrides, running, stop


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


def test_a_killed_measurement_leaves_no_server(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from hybrid_backend.tools.bench.servers import interruptible, free_port, running
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
with interruptible(), running(sleeps, free_port(), "model", Path(sys.argv[1])):
    pass
"""
    measuring = subprocess.Popen([sys.executable, "-c", script, tmp_path / "server.log"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (started := psutil.Process(measuring.pid).children()):
            assert measuring.poll() is None and time.monotonic() < deadline, "it started no server"
            time.sleep(0.001)  # right as it starts, too
        measuring.terminate()
        assert measuring.wait(60) != 0
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive
    finally:
        measuring.kill()


def test_an_interrupt_at_any_call_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM arrives at each call of the start, the wait and the stop in turn: there Python looks for signals."""
    monkeypatch.setattr(servers, "START_DEADLINE", 0.0)
    files = {servers.__file__, contextlib.__file__, subprocess.__file__, threading.__file__}
    interrupts = 0
    for call_to_hit in itertools.count(1):
        calls = itertools.count(1)

        def terminate(
            frame: FrameType, _event: str, _: Any, calls: Any = calls, call_to_hit: int = call_to_hit
        ) -> None:
            if frame.f_code.co_filename in files and next(calls) == call_to_hit:
                os.kill(os.getpid(), signal.SIGTERM)

        before = set(psutil.Process().children())
        with interruptible(), pytest.raises((KeyboardInterrupt, BenchError)) as ended:
            server = running(["sleep", "600"], free_port(), "model", tmp_path / "server.log")
            try:
                sys.setprofile(terminate)
                with server:
                    pytest.fail("it does not answer")
            finally:
                sys.setprofile(None)
        left = set(psutil.Process().children()) - before
        for child in left:
            child.kill()
        assert not left, f"the interrupt at call {call_to_hit} left {left}"
        interrupts += ended.type is KeyboardInterrupt
        if next(calls) <= call_to_hit:  # so many calls are not made
            break
    assert interrupts > 50


def test_a_measurement_in_the_background_stops_its_server_at_once(tmp_path: Path) -> None:
    """Background jobs, nohup and many CI runners ignore SIGINT, which children inherit."""
    script = """
import signal, sys, time
from pathlib import Path
from hybrid_backend.tools.bench import servers
signal.signal(signal.SIGINT, signal.SIG_IGN)
servers.START_DEADLINE = 0.0
begin = time.monotonic()
try:
    with servers.running(["sleep", "600"], servers.free_port(), "model", Path(sys.argv[1])):
        pass
except servers.BenchError:
    print(time.monotonic() - begin)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "server.log"], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(done.stdout) < 10


def test_the_processes_of_a_server_that_crashed_are_killed(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    leaves = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    with (
        pytest.raises(BenchError, match="a server ended with 0"),
        running([sys.executable, "-c", leaves], free_port(), "model", log),
    ):
        pytest.fail("it has ended")
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(log.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_does_not_end_by_itself_is_killed_and_no_error() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline()
    stop(process, grace=0.1)
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "scot"}, "unknown method 'scot'"),
        ({"workers.kernel": "abacus"}, "unknown kernel 'abacus'"),
        ({"budget_tokens": 100}, "a multiple of page_size 16"),
    ],
)
def test_what_a_server_would_refuse_is_refused_before_it_starts(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(servers.DEMO, keys)


def test_overrides_are_read_as_hybrid_serve_reads_them() -> None:
    assert parse_overrides(["budget_tokens=1024", "recall.enabled=false"]) == {
        "budget_tokens": 1024,
        "recall.enabled": False,
    }
    heads = parse_overrides(["headinfer.resident_heads=[3:1]", "selection.bound=1e-1"])
    assert heads == {"headinfer.resident_heads": ["3:1"], "selection.bound": 0.1}
    assert configured(servers.DEMO, heads).headinfer.resident_heads == ("3:1",)
    with pytest.raises(ConfigError, match="--set"):
        parse_overrides(["recall.enable=false"])
