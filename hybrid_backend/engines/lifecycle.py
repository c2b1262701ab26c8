"""End of a server, the same for both engines: its signals, its processes, its files and its exit status."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import psutil  # both engines require it

from hybrid_backend.errors import EngineError

DRAIN_SECONDS = 30
"""Seconds for requests in flight after the first signal, unless the user chooses another time."""
GRACE_SECONDS = 15.0
"""Seconds that the engine itself then has to end."""
_POLL_SECONDS = 0.1
"""Seconds between two checks for crashed processes of the engine."""
_PREFIX = "hybrid-"
_OWNER = "owner"
_LONGEST_PARENT = 107 - len("/hybrid-12345678/") - 36
"""Characters of the longest path whose sub-folder can hold the engine's sockets.

Linux allows 107 characters; vLLM's names are 36 long, SGLang's 11."""
_SERVED = "HYBRID_SERVED"
"""Variable in all processes of a server, which holds the server's URL once that is known."""
_ENDING = "HYBRID_ENDING"
"""Variable that is set in the server's own process after the first signal."""
_WARNINGS = "PYTHONWARNINGS"
_NO_TRACKER_WARNING = "ignore:resource_tracker:UserWarning"
"""Filter for Python's resource tracker, which warns whenever it removes shared memory of a process that has ended."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHARED_MEMORY = Path("/dev/shm")
_OPENMP = "__KMP_REGISTERED_LIB_"


class ServerProcess:
    """The process that `hybrid serve` runs in.

    Attributes:
        folder: folder that the process shares with the engine's processes.
        first_signal: the first signal that the process got.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first_signal: int | None = None
        self._drain_deadline = 0.0
        self._watched: dict[BaseProcess, str] = {}  # The titles of the engine's processes.
        self._lock = threading.RLock()  # A signal handler may call `clean_up` while its own thread holds the lock.

    def set_address(self, url: str) -> None:
        """Tell all processes of the server its URL (`served_address`)."""
        os.environ[_SERVED] = url

    def watch_engine(self) -> None:
        """Remember the processes that the engine has started so far.

        After the first signal, a crash of any of them ends the server.
        """
        with self._lock:
            for process in multiprocessing.active_children():
                self._watched.setdefault(process, _title(process))

    def on_signal(self, number: int, stop: Callable[[], None], drain_seconds: float = DRAIN_SECONDS) -> None:
        """End in order at the first signal, and at once at a second one or when the time is over.

        Args:
            number: the signal.
            stop: makes the engine answer its requests and end.
            drain_seconds: how long the engine lets requests in flight run.
        """
        if self.first_signal is not None:
            self.end_at_once(number)
        self.first_signal = number
        os.environ[_ENDING] = "1"
        self._drain_deadline = time.monotonic() + drain_seconds
        self.watch_engine()
        _print_line(f"{signal.Signals(number).name}: ending after the requests in flight; a second signal ends at once")
        deadline = threading.Timer(drain_seconds + GRACE_SECONDS, self.end_at_once, [number])
        deadline.daemon = True
        deadline.start()
        threading.Thread(target=self._end_on_crash, daemon=True, name="hybrid-crashes").start()
        stop()

    def expect_ends(self) -> None:
        """End the server if a process of the engine has crashed.

        From now on the engine may end its processes in any way, also by SIGKILL.
        """
        with self._lock:
            self._check_engine()
            self._watched.clear()

    def end_at_once(self, number: int, frame: FrameType | None = None) -> NoReturn:
        """Kill the engine's processes, remove the server's files and end with the exit status of the signal."""
        _print_line(f"{signal.Signals(number).name}: ending at once")
        self.clean_up()
        os._exit(128 + number)

    def clean_up(self) -> None:
        """Kill the remaining processes of the engine, and remove the server's files."""
        with self._lock:
            self._watched.clear()
            _remove_openmp_files([os.getpid(), *_kill_children()])
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self) -> NoReturn:
        """End this process, once the engine has ended in order: with status 0, or 1 if the engine crashed meanwhile.

        Raises:
            EngineError: no signal stopped the engine, so it has crashed.
        """
        if self.first_signal is None:
            raise EngineError("the engine ended by itself; the reason is in the log above")
        self.expect_ends()
        self.clean_up()
        _exit_quickly(0)

    def _end_on_crash(self) -> None:
        """End the server when a process of the engine crashes, because vLLM would keep clients waiting for answers."""
        while self._watched:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                self._check_engine()

    def _check_engine(self) -> None:
        is_overdue = time.monotonic() >= self._drain_deadline
        for process in tuple(self._watched):
            exit_code = _exit_code(process)
            if exit_code is None:
                continue
            title = self._watched.pop(process)
            if _is_crash(exit_code, is_overdue):
                _print_line(f"hybrid: the engine crashed while the server ended: {title} {_status(exit_code)}")
                process.join()  # `clean_up` must see that the process has ended.
                self.clean_up()
                os._exit(1)


@contextmanager
def served() -> Iterator[ServerProcess]:
    """Run a server in the context, after which no process and no file of the server remains.

    A signal that comes before the engine handles signals itself ends the server at once.
    """
    _remove_dead_folders()
    _end_quietly()
    folder, lock = _own_folder()
    server = ServerProcess(folder)
    # A shell's background jobs ignore SIGINT, and must go on ignoring it.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, server.end_at_once) for number in numbers}
    own_warnings = os.environ.get(_WARNINGS)
    warnings = f"{own_warnings},{_NO_TRACKER_WARNING}" if own_warnings else _NO_TRACKER_WARNING
    try:
        with environment({_WARNINGS: warnings, _SERVED: "1"}):
            yield server
    finally:
        server.clean_up()
        lock.close()
        os.environ.pop(_ENDING, None)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment in the context, and put their earlier values back afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def is_served() -> bool:
    """Tell whether this process is, or belongs to, a server that `hybrid serve` runs."""
    return _SERVED in os.environ


def served_address() -> str:
    """Return the URL of the server that this process is, or belongs to."""
    return os.environ[_SERVED]


def is_ending() -> bool:
    """Tell whether the server that this process runs was told to end."""
    return _ENDING in os.environ


def join_server() -> None:
    """Tie a process of an engine to the `hybrid serve` that started it, if one did.

    The process ends as soon as its parent has ended. It leaves Ctrl-C, which a terminal sends to a whole process group,
    to the server.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not is_served():
        return
    _end_without_teardown()
    with suppress(OSError):  # The process leads a session of its own.
        os.setpgid(0, 0)
    threading.Thread(target=_follow, args=(parent,), daemon=True, name="hybrid-parent").start()


def _title(process: BaseProcess) -> str:
    """Return the title that an engine has given to its process, or the process's name in Python."""
    with suppress(psutil.Error):
        # A title leaves empty words where the command line was longer.
        words = [word for word in psutil.Process(process.pid).cmdline() if word]
        if len(words) == 1:
            return words[0]
    return process.name


def _exit_code(process: BaseProcess) -> int | None:
    """Return the exit code of a process, negative for a signal; None while the process runs.

    The engine waits for its processes in other threads. So the code is read without taking it from the kernel.
    """
    assert process.pid is not None
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # The engine has waited for the process already.
        return process.exitcode
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _is_crash(exit_code: int, is_overdue: bool) -> bool:
    """Tell a crash from an orderly end: status 0, SIGTERM from the engine or SIGINT from a terminal.

    Args:
        exit_code: of a process of the engine, negative for a signal.
        is_overdue: the time for requests in flight is over; vLLM then kills its processes.
    """
    return exit_code not in (0, -signal.SIGTERM, -signal.SIGINT) and not (is_overdue and exit_code == -signal.SIGKILL)


def _status(exit_code: int) -> str:
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with status {exit_code}"


def _follow(parent: BaseProcess) -> None:
    parent.join()
    _remove_openmp_files([os.getpid()])
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_of_folders() -> str:
    """Return the folder for temporary files, or ``/tmp`` if sockets in it would have too long a path."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _LONGEST_PARENT else "/tmp"


def _own_folder() -> tuple[Path, IO[str]]:
    """Make a folder for temporary files, and the lock that shows that its owner lives.

    Once the lock is closed, `_remove_dead_folders` may remove the folder. The kernel closes it for a killed process.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_parent_of_folders()))
    lock = (folder / "starting").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # No other server may see the file before it is locked.
    (folder / "starting").rename(folder / _OWNER)
    return folder, lock


def _remove_dead_folders() -> None:
    """Remove the temporary files of servers that were killed."""
    for owner in Path(_parent_of_folders()).glob(f"{_PREFIX}*/{_OWNER}"):
        try:
            if owner.parent.lstat().st_uid == os.getuid():
                with owner.open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(owner.parent, ignore_errors=True)
        except OSError:  # The owner lives, or another server removed the folder.
            continue


def _kill_children() -> list[int]:
    """Kill all descendants of this process and return their ids.

    Python's resource tracker is left to end by itself, because it removes the shared memory of all others first.
    """
    children = []
    for child in psutil.Process().children(recursive=True):
        try:
            if not any("resource_tracker" in word for word in child.cmdline()):
                child.kill()
                children.append(child)
        except psutil.Error:  # The process has ended.
            continue
    psutil.wait_procs(children, timeout=5)
    return [child.pid for child in children]


def _remove_openmp_files(dead: Iterable[int]) -> None:
    """Remove the files in shared memory by which Intel's OpenMP notices a second copy of itself.

    A killed process leaves its file behind.

    Args:
        dead: processes that are ending. Files of processes that have ended are removed as well.
    """
    ending = {str(pid) for pid in dead}
    for file in _SHARED_MEMORY.glob(f"{_OPENMP}*_{os.getuid()}"):
        pid = file.name.removeprefix(_OPENMP).partition("_")[0]
        if pid in ending or not Path("/proc", pid).exists():
            file.unlink(missing_ok=True)


def _end_without_teardown() -> None:
    """Have this process skip the interpreter's teardown when it ends, and keep its exit status, which engines read.

    `multiprocessing` ends a child by `sys.exit`, and exit handlers do not get the status.
    """
    statuses, leave = [0], sys.exit

    def exit_and_remember(status: str | int | None = None) -> NoReturn:
        statuses.append(status if isinstance(status, int) else int(status is not None))
        leave(status)

    sys.exit = exit_and_remember
    atexit.register(lambda: _exit_quickly(statuses[-1]))


def _print_line(line: str) -> None:
    """Print to stderr from a signal handler, where print() would fail if the signal interrupted another print()."""
    with suppress(OSError):  # Nothing reads stderr any more.
        os.write(2, f"{line}\n".encode())


def _exit_quickly(status: int) -> NoReturn:
    """End this process without tearing the interpreter down, which takes seconds of CPU time with torch loaded."""
    with suppress(OSError, ValueError):  # A stream is closed, or nothing reads it any more.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end_quietly() -> None:
    """Drop the output of libraries while the interpreter ends: nanobind lists each remaining object of Triton.

    Exit handlers run in reverse order, so that all others may still print.
    """
    atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)
