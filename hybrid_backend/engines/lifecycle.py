"""How a server ends, the same for both engines: its signals, its processes, its files and its exit status."""

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import psutil  # both engines require it

from hybrid_backend.errors import EngineError

DRAIN_SECONDS = 30
"""How long requests in flight may take after the first signal, unless the user chooses otherwise."""
GRACE_SECONDS = 15.0
"""How much longer the engine itself may take to end."""
_PREFIX, _OWNER = "hybrid-", "owner"
_SERVED = "HYBRID_SERVED"  # is set in all processes of a server
_WARNINGS, _TRACKER = "PYTHONWARNINGS", "ignore:resource_tracker:UserWarning"
"""Python's resource tracker removes shared memory of processes that have ended, and warns each time."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHARED_MEMORY = Path("/dev/shm")
_OPENMP = "__KMP_REGISTERED_LIB_"


class Life:
    """State of one running server: the folder that its processes share, and the first signal that it got."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first_signal: int | None = None

    def on_signal(self, number: int, stop: Callable[[], None], drain_seconds: float = DRAIN_SECONDS) -> None:
        """End in order at the first signal; at once at a second one, or when the time is over.

        Args:
            number: the signal.
            stop: what makes the engine answer its requests and end.
            drain_seconds: how long the engine lets requests in flight run.
        """
        if self.first_signal is not None:
            self.end_at_once(number)
        self.first_signal = number
        deadline = threading.Timer(drain_seconds + GRACE_SECONDS, self.end_at_once, [number])
        deadline.daemon = True
        deadline.start()
        stop()

    def end_at_once(self, number: int, frame: FrameType | None = None) -> NoReturn:
        """Kill the engine's processes, remove the server's files and end with the exit status of the signal."""
        # A print() here would fail if the signal interrupted another one.
        os.write(2, f"{signal.Signals(number).name}: ending at once\n".encode())
        self.clean_up()
        os._exit(128 + number)

    def clean_up(self) -> None:
        """Kill what is left of the engine's processes, and remove the server's files."""
        _remove_openmp_files([os.getpid(), *_kill_children()])
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self) -> NoReturn:
        """End this process with status 0, once the engine has ended in order.

        Raises:
            EngineError: nobody stopped the engine, so it has crashed.
        """
        if self.first_signal is None:
            raise EngineError("the engine ended by itself; the reason is in the log above")
        self.clean_up()
        _exit_quickly(0)


@contextmanager
def served() -> Iterator[Life]:
    """Run a server inside: however it ends, no process and no file of it stays. A signal that comes before the engine
    handles signals itself ends the server at once."""
    _remove_dead_folders()
    _end_quietly()
    folder, lock = _own_folder()
    life = Life(folder)
    # A shell's background jobs ignore SIGINT, and go on ignoring it while they start.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, life.end_at_once) for number in numbers}
    warnings = os.environ.get(_WARNINGS)
    os.environ[_WARNINGS] = f"{warnings},{_TRACKER}" if warnings else _TRACKER
    os.environ[_SERVED] = "1"
    try:
        yield life
    finally:
        life.clean_up()
        lock.close()
        del os.environ[_SERVED]
        if warnings is None:
            del os.environ[_WARNINGS]
        else:
            os.environ[_WARNINGS] = warnings
        for number, handler in handlers.items():
            signal.signal(number, handler)


def join_server() -> None:
    """Tie a process of an engine to the `hybrid serve` that started it, if one did: it ends as soon as its parent is
    gone, and leaves Ctrl-C, which a terminal sends to all processes, to the server."""
    parent = multiprocessing.parent_process()
    if parent is None or _SERVED not in os.environ:
        return
    _end_without_teardown()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(parent,), daemon=True, name="hybrid-parent").start()


def _follow(parent: BaseProcess) -> None:
    parent.join()
    _remove_openmp_files([os.getpid()])
    os.kill(os.getpid(), signal.SIGKILL)


def _own_folder() -> tuple[Path, IO[str]]:
    """Make a folder for temporary files, and the lock that shows that its owner lives. Closing the lock, which the
    kernel does for a killed process, gives the folder free to `_remove_dead_folders`."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = (folder / "starting").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "starting").rename(folder / _OWNER)  # so that no other server sees the file before it is locked
    return folder, lock


def _remove_dead_folders() -> None:
    """Remove the temporary files of servers that were killed."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        try:
            if owner.parent.lstat().st_uid == os.getuid():
                with owner.open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(owner.parent, ignore_errors=True)
        except OSError:  # its owner lives, or another server removed it
            continue


def _kill_children() -> list[int]:
    """Kill all descendants of this process; returns their ids. Python's resource tracker ends by itself, after it has
    removed the shared memory of the others."""
    children = []
    for child in psutil.Process().children(recursive=True):
        try:
            if not any("resource_tracker" in word for word in child.cmdline()):
                child.kill()
                children.append(child)
        except psutil.Error:  # it has ended
            continue
    psutil.wait_procs(children, timeout=5)
    return [child.pid for child in children]


def _remove_openmp_files(dead: Iterable[int]) -> None:
    """Remove the files in shared memory by which Intel's OpenMP notices a second copy of itself. A killed process
    leaves its file behind.

    Args:
        dead: processes that are ending, beside those that have ended.
    """
    ending = {str(pid) for pid in dead}
    for file in _SHARED_MEMORY.glob(f"{_OPENMP}*_{os.getuid()}"):
        pid = file.name.removeprefix(_OPENMP).partition("_")[0]
        if pid in ending or not Path("/proc", pid).exists():
            file.unlink(missing_ok=True)


def _end_without_teardown() -> None:
    """Have this process skip the interpreter's teardown when it ends, and keep its exit status, which engines look at.

    `multiprocessing` ends a child by `sys.exit`; exit handlers are not told the status.
    """
    statuses, leave = [0], sys.exit

    def exit_and_remember(status: str | int | None = None) -> NoReturn:
        statuses.append(status if isinstance(status, int) else int(status is not None))
        leave(status)

    sys.exit = exit_and_remember
    atexit.register(lambda: _exit_quickly(statuses[-1]))


def _exit_quickly(status: int) -> NoReturn:
    """End this process without tearing the interpreter down, which takes seconds of CPU time with torch loaded."""
    with suppress(OSError, ValueError):  # closed, or nobody reads it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end_quietly() -> None:
    """Drop what libraries print while the interpreter ends: nanobind lists each object of Triton that is still there.
    Exit handlers run in reverse order, so that all others may still print."""
    atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)
