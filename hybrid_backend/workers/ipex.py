"""The IPEX worker: attention by intel-extension-for-pytorch (IPEX) in a separate process and Python environment.

IPEX 2.8 is the last release and requires torch 2.8, so the engine's process cannot load it. The process runs
`ipex_process.py` with the interpreter in ``HYBRID_IPEX_PYTHON``. Both processes map two staging areas: while the IPEX
process attends over one area, a thread of the engine's process fills the other.

Costs and limits:

* The engine's KV memory is not shared with the process, so the worker copies every selected page into an area.
* An area grows to the largest job, rounded up to a power of two, and never shrinks.
* IPEX's paged operator returns no LSE, so IPEX's flash attention runs over the staged tokens.
* IPEX returns outputs in the model's dtype, so in bf16 a partial is rounded to 8 bits before the merge.
* Jobs run one after the other, and so do page lists of different lengths in a job. IPEX runs (sequence, KV head) pairs
  in parallel.
* The device tier of a machine without a GPU does not use IPEX, but the kernel that ``auto`` selects.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList, empty_partial
from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.kernels.operations import PromptToJudge
from hybrid_backend.workers.base import Owners, Ticket, WorkerPool
from hybrid_backend.workers.cpus import name_thread
from hybrid_backend.workers.ipex_job import Area, Job, check_shapes
from hybrid_backend.workers.judging import JudgeThread, Judging
from hybrid_backend.workers.registry import HOW_TO_GET_IPEX, ipex_python

PROGRAM = Path(__file__).with_name("ipex_process.py")
START_SECONDS = 300.0
"""Limit for the start of the IPEX process, which takes seconds, or over a minute without an idle core."""
_AREAS = 2
_MESSAGE_BYTES = 65536
# The engine's variables for OpenMP and Python do not fit the environment that has IPEX.
_NOT_INHERITED = ("PYTHON", "OMP_", "KMP_", "GOMP_", "LD_PRELOAD", "VIRTUAL_ENV")


class IpexPool(WorkerPool):
    """A pool whose only worker is an IPEX process. Jobs run in the order of submission, from any number of threads."""

    def __init__(self, threads: int, cpus: list[int], command: Sequence[str] | None = None) -> None:
        """Start the process and wait until it is ready, which takes seconds.

        Args:
            threads: OpenMP threads of the process.
            cpus: CPUs that the process, and the thread that copies pages, may run on.
            command: program to start. None: `PROGRAM` with the interpreter in ``HYBRID_IPEX_PYTHON``.

        Raises:
            ConfigError: the interpreter is missing, or IPEX does not load in it.
        """
        self.cpus = cpus
        self.threads = threads
        self._judge = JudgeThread(cpus)
        command = command or [ipex_python(), "-I", str(PROGRAM)]
        self._areas = [Area() for _ in range(_AREAS)]
        self._link, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open until `close`)
        descriptors = [child_end.fileno(), *(area.descriptor for area in self._areas)]
        settings = [str(os.getpid()), str(threads), ",".join(map(str, cpus))]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        environment |= {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",  # No thread spins, because the engine may use the same cores.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # Otherwise the import of IPEX starts a pool of compiler processes.
        }
        self._process = subprocess.Popen(
            [*command, str(descriptors[0]), *settings, *map(str, descriptors[1:])],
            pass_fds=descriptors,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )
        child_end.close()
        self._numbers = itertools.count()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Area] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Job, Area]] = {}  # Sent, unanswered jobs by number; guarded by the lock.
        self._dead: str | None = None  # Why the process no longer answers; guarded by the lock.
        self._closed = False
        self._await_ready(command)
        for area in self._areas:
            self._free.put(area)
        self._threads = [
            threading.Thread(target=target, name=f"hybrid-ipex-{target.__name__}", daemon=True)
            for target in (self._stage_jobs, self._take_answers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def submit(
        self, q: Tensor, layer: Tensor, pages: PageList, scale: float, what: str, owners: Owners | None = None
    ) -> Ticket:
        """Start a job (`WorkerPool.submit`).

        Raises:
            ValueError: the shapes do not fit, or ``layer`` is not contiguous.
            WorkerError: the pool is closed.
        """
        check_shapes(q, layer, pages)
        job = Job(next(self._numbers), q, layer, pages, scale, what, owners)
        with self._lock:
            if self._closed:
                raise WorkerError("the IPEX worker is closed")
            self._jobs.put(job)
        return job

    def judge(self, prompt: PromptToJudge, what: str) -> Judging:
        """Judge a prompt (`WorkerPool.judge`) in a thread of the engine's process."""
        return self._judge.judge(prompt, what)

    def close(self) -> None:
        """End the process and free the shared memory. Unfinished jobs fail."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._dead = self._dead or "the worker was closed"
            self._jobs.put(None)
        self._judge.close()
        self._link.shutdown(socket.SHUT_RDWR)  # The process and both threads end when the socket is shut down.
        self._end_process()
        for thread in self._threads:
            thread.join()
        self._release()

    def _await_ready(self, command: Sequence[str]) -> None:
        """Wait for the first packet of the process; raise ConfigError if no packet comes."""
        self._link.settimeout(START_SECONDS)
        is_late = False
        try:
            hello = self._link.recv(_MESSAGE_BYTES)
        except TimeoutError:
            hello, is_late = b"", True
        except ConnectionError:
            hello = b""
        self._link.settimeout(None)
        if hello:
            return
        self._end_process(timeout=1.0)
        reason = f"no answer within {START_SECONDS:.0f} s" if is_late else self._last_line()
        self._release()
        raise ConfigError(
            f"workers.kernel: IPEX does not start with HYBRID_IPEX_PYTHON={command[0]}: {reason}; {HOW_TO_GET_IPEX}"
        )

    def _end_process(self, timeout: float = 5.0) -> int:
        """Wait until the process has ended, kill the process after ``timeout`` seconds, and return the exit status."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _last_line(self) -> str:
        """Return the last line that the process printed."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _release(self) -> None:
        """Close the socket, the output file and the shared memory."""
        self._link.close()
        self._output.close()
        for area in self._areas:
            area.close()

    def _stage_jobs(self) -> None:
        """Copy the pages of each job into a free area and send the job (body of a thread)."""
        name_thread()
        os.sched_setaffinity(0, self.cpus)
        # A second team of OpenMP threads would compete with the engine's. The C function: see `judging.begin_worker`.
        torch._C.set_num_threads(1)
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                if not job.abandoned:
                    self._stage(job)

    def _stage(self, job: Job) -> None:
        """Copy a job into a free area and send the job, or finish the job if it has no pages to attend."""
        area = self._free.get()
        try:
            staged = None if job.abandoned else job.stage()
            if staged is None:
                job.finish(empty_partial(job.q))
                self._free.put(area)
                return
            packet = area.fill(staged, job.number, self._areas.index(area), job.scale)
        except Exception as error:
            job.fail(f"{type(error).__name__}: {error}" if not isinstance(error, WorkerError) else str(error))
            self._free.put(area)
            return
        with self._lock:
            dead = self._dead
            if dead is None:
                self._running[job.number] = (job, area)
        if dead is not None:
            job.fail(dead)
            self._free.put(area)
            return
        # If the process has ended, `_take_answers` reads the end of the socket and fails all running jobs.
        with contextlib.suppress(OSError):
            self._link.send(packet)

    def _take_answers(self) -> None:
        """Finish jobs with the answers of the process; fail running jobs when the process ends (body of a thread)."""
        with torch.inference_mode():
            while packet := self._receive():
                answer = json.loads(packet)
                with self._lock:
                    job, area = self._running.pop(answer["job"])
                if "error" in answer:
                    job.fail(answer["error"])
                else:
                    job.finish(job.unpack(area.view("out"), area.view("lse")))
                self._free.put(area)
        with self._lock:
            dead = self._dead = self._dead or self._cause_of_death()
            running = list(self._running.values())
            self._running.clear()
        for job, area in running:
            job.fail(dead)
            self._free.put(area)

    def _receive(self) -> bytes:
        """Return the next packet of the process; empty once the socket is closed."""
        try:
            return self._link.recv(_MESSAGE_BYTES)
        except OSError:
            return b""

    def _cause_of_death(self) -> str:
        """Return the message that says how the process ended."""
        status = self._end_process()
        ending = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"the IPEX process {ending}: {self._last_line()}"
