"""The IPEX worker: intel-extension-for-pytorch's attention, in a process and a Python environment of its own.

The last IPEX, 2.8, is archived and loads into torch 2.8 only, so it cannot live in the engine's process. The process
runs `ipex_process.py` with the Python that ``HYBRID_IPEX_PYTHON`` names. Both sides map two staging areas: while the
process attends over one, a thread here fills the other.

What that costs, and its limits:

* The engine's KV memory is not shared, so every selected page is copied once more: its bytes are read, written, and
  read again by the process. A native worker reads them once.
* The areas grow to the largest job, rounded up to a power of two, and stay; memory is taken where it was written.
* IPEX's paged operator returns no LSE, so its flash attention over the staged tokens is used, which does.
* IPEX writes its output in the model's dtype: in bf16 a partial is rounded to 8 bits before the merge.
* Jobs run one after the other, each on all threads, lists of different lengths one after the other too; an operator
  call is parallel over (sequence, KV head) only.
* Only the workers use IPEX. The device tier of a machine without a device stays with the kernel that ``auto`` means.
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
from hybrid_backend.workers.base import Owners, Ticket, WorkerPool
from hybrid_backend.workers.cpus import name_thread
from hybrid_backend.workers.ipex_job import Area, Job, check_shapes
from hybrid_backend.workers.registry import HOW_TO_GET_IPEX, ipex_python

PROGRAM = Path(__file__).with_name("ipex_process.py")
START_SECONDS = 300.0  # it takes seconds, on a machine without an idle core a minute and more
_AREAS = 2
_MESSAGE_BYTES = 65536
# The engine's own settings for its OpenMP threads and its Python do not fit the other environment.
_NOT_INHERITED = ("PYTHON", "OMP_", "KMP_", "GOMP_", "LD_PRELOAD", "VIRTUAL_ENV")


class IpexPool(WorkerPool):
    """One process of IPEX. Any number of threads may submit; jobs are answered in order."""

    def __init__(self, threads: int, cpus: list[int], command: Sequence[str] | None = None) -> None:
        """Starts the process and waits for it; that takes seconds.

        Args:
            threads: OpenMP threads of the process.
            cpus: where they may run; the thread that stages pages runs there too.
            command: what to start instead of `PROGRAM` in the environment that ``HYBRID_IPEX_PYTHON`` names.

        Raises:
            ConfigError: there is no such environment, or IPEX does not load in it.
        """
        self.cpus = cpus
        self.threads = threads
        command = command or [ipex_python(), "-I", str(PROGRAM)]
        self._areas = [Area() for _ in range(_AREAS)]
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the pool)
        passed = [theirs.fileno(), *(area.descriptor for area in self._areas)]
        settings = [str(os.getpid()), str(threads), ",".join(map(str, cpus))]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        environment |= {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",  # the cores may be shared with the engine: nobody spins
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else importing IPEX starts a pool of compile processes
        }
        self._process = subprocess.Popen(
            [*command, str(passed[0]), *settings, *map(str, passed[1:])],
            pass_fds=passed,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._complaints,
            stderr=self._complaints,
        )
        theirs.close()
        self._numbers = itertools.count()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Area] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Job, Area]] = {}  # sent and not answered; guarded by the lock
        self._dead: str | None = None  # why nothing is answered any more; guarded by the lock
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
        """As `WorkerPool.submit`; ``layer`` ``[pages, kv_heads, 2, page_size, head_dim]`` contiguous.

        Raises:
            ValueError: a shape that IPEX's operator lacks.
            WorkerError: the pool is closed.
        """
        check_shapes(q, layer, pages)
        job = Job(next(self._numbers), q, layer, pages, scale, what, owners)
        with self._lock:
            if self._closed:
                raise WorkerError("the IPEX worker is closed")
            self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the process and free the shared memory. Jobs that nobody waited for are dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._dead = self._dead or "the worker was closed"
            self._jobs.put(None)
        self._link.shutdown(socket.SHUT_RDWR)  # ends the process and both threads
        self._end_process()
        for thread in self._threads:
            thread.join()
        self._release()

    # --- the process ---

    def _await_ready(self, command: Sequence[str]) -> None:
        self._link.settimeout(START_SECONDS)
        late = False
        try:
            hello = self._link.recv(_MESSAGE_BYTES)
        except TimeoutError:
            hello, late = b"", True
        except ConnectionError:
            hello = b""
        self._link.settimeout(None)
        if hello:
            return
        self._end_process(timeout=1.0)
        complaint = f"no answer within {START_SECONDS:.0f} s" if late else self._last_complaint()
        self._release()
        raise ConfigError(
            f"workers.kernel: IPEX does not start with HYBRID_IPEX_PYTHON={command[0]}: {complaint}; {HOW_TO_GET_IPEX}"
        )

    def _end_process(self, timeout: float = 5.0) -> int:
        """The exit status. The process ends by itself once the socket is shut; a stopped one is killed."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _last_complaint(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _release(self) -> None:
        self._link.close()
        self._complaints.close()
        for area in self._areas:
            area.close()

    # --- jobs ---

    def _stage_jobs(self) -> None:
        """A thread: copies pages into a free area and sends the job."""
        name_thread()
        os.sched_setaffinity(0, self.cpus)
        # One thread copies: a second OpenMP team would compete with the engine's. As in `TorchPool`.
        torch._C.set_num_threads(1)
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                if not job.abandoned:
                    self._stage(job)

    def _stage(self, job: Job) -> None:
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
        # If the process is gone, the other thread learns it from the same socket and fails what runs.
        with contextlib.suppress(OSError):
            self._link.send(packet)

    def _take_answers(self) -> None:
        """A thread: hands results to the waiters."""
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
        try:
            return self._link.recv(_MESSAGE_BYTES)
        except OSError:
            return b""

    def _cause_of_death(self) -> str:
        status = self._end_process()
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"the IPEX process {how}: {self._last_complaint()}"
