"""How a server ends, with processes as engines start them: killed, signalled at start, signalled twice, crashed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from hybrid_backend.engines.lifecycle import join_server, served

def child(ready):
    join_server()
    Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").touch()
    ready.set()
    time.sleep(600)

def fail():
    join_server()
    raise RuntimeError

def fail_after(event):
    event.wait()
    fail()

def wait():
    while True:
        try:
            time.sleep(600)
        except BaseException:  # as vLLM's zmq_socket_ctx swallows KeyboardInterrupt
            pass

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with served() as server:
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Event()
        process = spawn.Process(target=child, args=(ready,))
        process.start()
        ready.wait()
        print(process.pid, server.folder, flush=True)
        sys.stdin.readline()
        exec(sys.argv[1])
"""
DEADLINE = 60


class Served:
    """A process that runs ``code`` inside `served`, the child that it started, and the folder of both."""

    def __init__(self, folder: Path, code: str) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, str(program), code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        pid, path = self.process.stdout.readline().split()
        self.child, self.folder = psutil.Process(int(pid)), Path(path)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.openmp = Path(f"/dev/shm/__KMP_REGISTERED_LIB_{pid}_{os.getuid()}")

    def end(self) -> int:
        return self.process.wait(DEADLINE)

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def check_child_ended(self) -> None:
        _, alive = psutil.wait_procs([self.child], DEADLINE)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not self.openmp.exists()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Served]]:
    started: list[Served] = []

    def start(code: str) -> Served:
        started.append(Served(tmp_path, code))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.end()
        server.check_child_ended()


def test_a_killed_server_takes_its_processes_along_and_the_next_start_removes_its_files(
    start: Callable[[str], Served],
) -> None:
    killed = start("wait()")
    living = start("wait()")
    killed.process.kill()
    killed.end()
    killed.check_child_ended()
    assert killed.folder.exists()
    assert start("pass").end() == 0
    assert not killed.folder.exists() and living.folder.exists()


def test_ctrl_c_in_a_terminal_reaches_the_server_alone(start: Callable[[str], Served]) -> None:
    """A terminal sends it to the process group in front."""
    server = start("wait()")
    assert os.getpgid(server.child.pid) == server.child.pid
    assert os.getsid(server.child.pid) == os.getsid(server.process.pid)  # It ends with the session.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_engine_starts_ends_the_server_at_once(start: Callable[[str], Served], number: int) -> None:
    server = start("wait()")
    server.process.send_signal(number)
    assert server.end() == 128 + number
    server.check_child_ended()
    assert not server.folder.exists()


DRAINING = """
signal.signal(signal.SIGTERM, lambda number, frame: server.on_signal(number, lambda: None, {seconds}))
broken = spawn.Event()
failing = spawn.Process(target=fail_after, args=(broken,))
failing.start()
{before}
os.kill(os.getpid(), signal.SIGTERM)
{end}
{rest}
"""
ENDED = "process.join(); server.finish()"
HANDLED = "signal.signal(signal.SIGTERM, lambda number, frame: server.on_signal(number, {stop}, {seconds})); {rest}"


def test_the_first_signal_ends_in_order_and_the_second_at_once(start: Callable[[str], Served]) -> None:
    stop = "lambda: print('stopping', flush=True)"
    server = start(HANDLED.format(stop=stop, seconds=600, rest="print('handled', flush=True); wait()"))
    assert server.process.stdout is not None and server.process.stdout.readline() == "handled\n"
    server.process.terminate()
    assert server.process.stdout.readline() == "stopping\n"
    server.process.terminate()
    assert server.end() == 128 + signal.SIGTERM
    server.check_child_ended()
    assert not server.folder.exists()


def test_a_server_whose_requests_do_not_end_is_ended_at_a_deadline(start: Callable[[str], Served]) -> None:
    rest = "os.kill(os.getpid(), signal.SIGTERM); wait()"
    server = start(HANDLED.format(stop="lambda: None", seconds="0.5 - 15", rest=rest))
    assert server.end() == 128 + signal.SIGTERM
    server.check_child_ended()


def test_an_engine_that_ends_by_itself_is_an_error_and_one_that_was_stopped_is_none(
    start: Callable[[str], Served],
) -> None:
    crashed = start("server.finish()")
    assert crashed.end() == 1 and "EngineError: the engine ended by itself" in crashed.stderr()
    crashed.check_child_ended()
    rest = "os.kill(os.getpid(), signal.SIGTERM); server.finish()"
    stopped = start(HANDLED.format(stop="lambda: None", seconds=600, rest=rest))
    assert stopped.end() == 0
    stopped.check_child_ended()
    assert not crashed.folder.exists() and not stopped.folder.exists()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("process.kill()", "SpawnProcess-1 was killed by SIGKILL"),
        ("os.kill(process.pid, signal.SIGSEGV)", "SpawnProcess-1 was killed by SIGSEGV"),
        ("broken.set()", "SpawnProcess-2 ended with status 1"),
    ],
)
def test_an_engine_that_crashes_while_requests_drain_ends_the_server_with_a_line_that_names_the_process(
    start: Callable[[str], Served], end: str, said: str
) -> None:
    crashed = start(DRAINING.format(before="", end=end, seconds=600, rest="wait()"))
    assert crashed.end() == 1
    assert f"hybrid: the engine crashed while the server ended: {said}\n" in crashed.stderr()
    crashed.check_child_ended()
    assert not crashed.folder.exists()


def test_an_engine_that_crashed_just_before_the_signal_is_an_error(start: Callable[[str], Served]) -> None:
    crashed = start(
        DRAINING.format(
            before="server.watch_engine(); process.kill(); process.join()", end="", seconds=600, rest="server.finish()"
        )
    )
    assert crashed.end() == 1 and "SpawnProcess-1 was killed by SIGKILL" in crashed.stderr()
    crashed.check_child_ended()


@pytest.mark.parametrize(("end", "seconds"), [("process.terminate()", 600), ("process.kill()", 0)])
def test_an_engine_that_ends_its_own_processes_has_not_crashed(
    start: Callable[[str], Served], end: str, seconds: int
) -> None:
    """vLLM ends them by SIGTERM, and by SIGKILL once the time for requests in flight is over."""
    stopped = start(DRAINING.format(before="", end=end, seconds=seconds, rest=ENDED))
    assert stopped.end() == 0
    stopped.check_child_ended()


def test_processes_that_the_engine_kills_after_its_requests_have_not_crashed(start: Callable[[str], Served]) -> None:
    """SGLang kills its detokenizer in every end."""
    stopped = start(DRAINING.format(before="", end="server.expect_ends(); process.kill()", seconds=600, rest=ENDED))
    assert stopped.end() == 0
    stopped.check_child_ended()


def test_a_process_of_the_engine_keeps_its_exit_status(start: Callable[[str], Served]) -> None:
    """Engines tell by it whether a process of theirs has crashed."""
    code = "failing = spawn.Process(target=fail); failing.start(); failing.join(); print(failing.exitcode, flush=True)"
    server = start(code)
    assert server.process.stdout is not None and server.process.stdout.readline() == "1\n"
    assert server.end() == 0


def test_what_libraries_print_while_the_interpreter_ends_is_dropped(start: Callable[[str], Served]) -> None:
    late = "type('Late', (), {'__del__': lambda self, write=os.write: write(2, b'late')})()"
    server = start(f"import builtins; builtins.late = {late}; print('an error', file=sys.stderr)")
    assert server.end() == 0 and server.stderr() == "an error\n"


def test_a_long_temporary_folder_leaves_room_for_the_engines_sockets(tmp_path: Path) -> None:
    """Linux allows 107 characters, of which vLLM's name of a socket takes 36."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    code = "from hybrid_backend.engines.lifecycle import served\nwith served() as server: print(server.folder)"
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert len(done.stdout.strip()) + 1 + 36 <= 107
    assert not Path(done.stdout.strip()).exists()
