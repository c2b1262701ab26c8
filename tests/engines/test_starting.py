"""Events in the life of a server before it serves: another one on its port, and a signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.engines.commands import run_command
from tests.engines.server import MODEL, executable, free_port

pytestmark = pytest.mark.engine
DEADLINE = 300


def wait_until_listening(port: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
            return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on port {port}")


def title(process: psutil.Process) -> str:
    """Return the command line of a process; empty if the process has ended meanwhile."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


ENGINE_TITLES = ("spawn_main", "VLLM::", "sglang::")
"""Parts of an engine process's title: Python's at first, then the one that the engine gives it."""


def wait_for_engine(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the server, once one of the engine's is among them."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        children = process.children(recursive=True)
        if any(part in title(child) for child in children for part in ENGINE_TITLES):
            return children
        time.sleep(0.1)
    raise AssertionError("the engine has no process")


def test_a_port_is_taken_at_once_and_sigterm_while_the_engine_starts_ends_the_server(
    tmp_path: Path, engine: ModuleType
) -> None:
    port = free_port()
    command = ["serve", MODEL, "--engine", engine.NAME, "--set=host_pool.size=256MiB", "--", "--port", str(port)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    with log.open("wb") as sink:
        first = subprocess.Popen([executable("hybrid"), *command], stdout=sink, stderr=sink, env=environment)
    try:
        wait_until_listening(port)
        (tmp_path / "second").mkdir()
        first.send_signal(signal.SIGSTOP)  # It must not be up before the second one has ended.
        run_command(["hybrid", *command], tmp_path / "second").check_refusal(f"--port: {port} is already in use")
        first.send_signal(signal.SIGCONT)
        processes = wait_for_engine(psutil.Process(first.pid))
        first.terminate()
        assert first.wait(DEADLINE) == 128 + signal.SIGTERM, log.read_text()[-2000:]
    finally:
        first.kill()
        first.wait()
    _, alive = psutil.wait_procs(processes, 60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not list(tmp_path.glob("hybrid-*"))
    text = log.read_text()
    assert "Traceback" not in text and "SIGTERM: ending at once" in text, text[-2000:]
