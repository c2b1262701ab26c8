"""Tests of a server's end. Each is the last test of a file, on the server that the file has started."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from openai import InternalServerError, OpenAIError

from hybrid_backend.engines.lifecycle import DRAIN_SECONDS
from tests.engines.server import Server
from tests.engines.texts import english

SECONDS = 300


@dataclass(frozen=True)
class Belongings:
    """The processes that a server has started, and the folder of its temporary files."""

    processes: list[psutil.Process]
    folder: Path

    @classmethod
    def of(cls, server: Server) -> Belongings:
        process = psutil.Process(server.process.pid)
        (owner,) = [Path(file.path) for file in process.open_files() if Path(file.path).name == "owner"]
        return cls(process.children(recursive=True), owner.parent)

    def process(self, name: str) -> psutil.Process:
        """Return the only process whose title contains ``name``."""
        (process,) = [process for process in self.processes if name in " ".join(process.cmdline())]
        return process

    def check_processes_gone(self) -> None:
        _, alive = psutil.wait_procs(self.processes, SECONDS)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        left = [str(file) for file in Path("/dev/shm").glob("__KMP_REGISTERED_LIB_*")]
        assert not [file for file in left for process in self.processes if f"_{process.pid}_" in file]


def a_signal_lets_requests_finish_and_leaves_nothing(server: Server, running_requests: str, number: int) -> None:
    """Stop the server while it answers: every request gets its answer, from then on the log tells of no error, and no
    process and no file stays. A new request is sent elsewhere.

    Args:
        server: is gone afterwards.
        running_requests: the engine's gauge.
        number: the signal; SIGINT goes to all processes, as a terminal sends it.
    """
    belongings = Belongings.of(server)
    prompts = [english(100, start=3000 * i) for i in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(server.complete, prompt, 24, extra_body={"ignore_eos": True}) for prompt in prompts]
        deadline = time.monotonic() + SECONDS
        while server.total(running_requests) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        told = len(server.log.read_text())
        os.killpg(server.process.pid, number) if number == signal.SIGINT else server.process.send_signal(number)
        with pytest.raises(InternalServerError, match="the server is ending"):
            while True:  # the signal is still on its way
                server.complete(english(20), 1)
        assert all(answer.result() for answer in answers)
    assert server.process.wait(SECONDS) == 0
    belongings.check_processes_gone()
    assert not belongings.folder.exists()
    log = server.log.read_text()[told:]
    assert not re.search(r"leaked|Traceback|\bERROR\b", log), log[-4000:]


def a_crash_is_no_success(server: Server, name: str) -> None:
    """Kill the process whose title contains ``name``: the server's exit status says so, and no process stays."""
    belongings = Belongings.of(server)
    belongings.process(name).kill()
    assert server.process.wait(SECONDS) != 0
    belongings.check_processes_gone()


def a_crash_while_requests_drain_is_no_success(server: Server, running_requests: str, name: str) -> None:
    """Kill the process whose title contains ``name`` after SIGTERM, while a request is still answered: the request
    fails, the server ends with status 1 and a line that says so, and no process stays.

    Args:
        server: is gone afterwards.
        running_requests: the engine's gauge.
        name: part of the process's title.
    """
    belongings = Belongings.of(server)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, english(20), 400, extra_body={"ignore_eos": True})
        deadline = time.monotonic() + SECONDS
        while server.total(running_requests) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.process.terminate()
        while "SIGTERM: ending after the requests in flight" not in server.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not answer.done()
        belongings.process(name).kill()
        killed = time.monotonic()
        assert isinstance(answer.exception(SECONDS), OpenAIError)
    assert time.monotonic() - killed < DRAIN_SECONDS, "the client waits for an answer that cannot come"
    assert server.process.wait(SECONDS) == 1
    assert "hybrid: the engine crashed while the server ended: " in server.log.read_text()
    belongings.check_processes_gone()


def a_killed_server_takes_its_processes_along(server: Server) -> None:
    """Kill the server itself: its processes end, which nobody asks to."""
    belongings = Belongings.of(server)
    server.process.kill()
    server.process.wait(SECONDS)
    belongings.check_processes_gone()
