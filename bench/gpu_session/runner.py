"""Runs the cases of a session one after the other, each in a process that is ended at its time limit."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench.gpu_session.journal import DONE, FAILED, LATE, STOPPED, Case, Journal, last_lines
from hybrid_backend.tools.bench.servers import interruptible

LOG_LINES = 25
GRACE = 15.0
"""Seconds in which a late case may stop its servers before all of its processes are killed."""
_PR_SET_CHILD_SUBREAPER = 36
CHILD = (sys.executable, "-m", "bench.gpu_session.case")


class Runner:
    """Runs cases until the budget is spent.

    ``root`` is the folder of the repository, in which ``child`` is run: the command that gets the journal's path, a
    folder for logs, and the case as JSON.
    """

    def __init__(
        self,
        journal: Journal,
        logs: Path,
        environment: Mapping[str, str],
        root: Path,
        child: Sequence[str] = CHILD,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.journal = journal
        self.logs = logs
        self.environment = environment
        self.root = root
        self.child = child
        self.tell = tell

    def run(self, cases: Sequence[Case], seconds: float, after_each: Callable[[], None]) -> None:
        """Run what is not done yet, in the order of ``cases``; what failed before comes last.

        A case that needs more than what is left is passed over. ``after_each`` is called after each case.
        """
        deadline = time.monotonic() + seconds
        ends = {case.name: self.journal.ends(case) for case in cases}
        for case in cases:
            if DONE in ends[case.name]:
                self.tell(f"{case.name}: done before")
        pending = [case for case in cases if DONE not in ends[case.name]]
        for case in sorted(pending, key=lambda case: len(ends[case.name])):
            left = deadline - time.monotonic()
            if left < case.needs:
                self.tell(f"{case.name}: not begun, it needs {case.needs:.0f} s and {max(0, left):.0f} s are left")
                continue
            limit = time_limit(case, left)
            self.tell(f"{case.name}: at most {limit:.0f} s")
            status, took = self.run_case(case, limit)
            self.tell(f"{case.name}: {status} after {took:.0f} s")
            after_each()

    def run_case(self, case: Case, limit: float) -> tuple[str, float]:
        """Run one case and write into the journal how it ended; leave no process of it behind."""
        _adopt_orphans(True)
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        log = self.logs / f"{case.name}.log"
        self.logs.mkdir(parents=True, exist_ok=True)
        began, status = time.monotonic(), STOPPED
        self.journal.append("begin", case, limit=round(limit, 1))
        with log.open("wb") as sink:
            command = [*self.child, str(self.journal.path), str(self.logs), json.dumps(case.identity)]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, **self.environment},
                cwd=self.root, start_new_session=True,
            )  # fmt: skip
            try:
                with interruptible():
                    status = DONE if process.wait(limit) == 0 else FAILED
            except subprocess.TimeoutExpired:
                status = LATE
            finally:
                _end_all(process, before)
                _adopt_orphans(False)
                took = time.monotonic() - began
                self.journal.append("end", case, status=status, seconds=round(took, 1), log=last_lines(log, LOG_LINES))
        return status, took


def time_limit(case: Case, left: float) -> float:
    """Return the seconds that a case may take of the seconds that are left.

    It is what the case needs, or half of what is left if that is more, so that a case that hangs leaves time to others.
    """
    return min(case.most, max(case.needs, left / 2))


def _adopt_orphans(adopts: bool) -> None:
    """Make this process the parent of descendants whose own parent ends, so that `_end_all` finds them; or no more."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def _end_all(process: subprocess.Popen[bytes], before: set[int]) -> None:
    """End a case's process and all that it has started; a process that stops its own servers gets `GRACE` seconds."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    for child in started:
        with suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGKILL)
    psutil.wait_procs(started, GRACE)
    process.wait()
