"""Prompts that CPU workers judge in the background: polled by the engine's thread, which never waits for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.kernels import judging_oracle
from hybrid_backend.kernels.cpu import NativeJudging
from hybrid_backend.kernels.operations import Judgement, PromptToJudge
from hybrid_backend.workers.cpus import name_thread

NICENESS = 10
"""Niceness of the thread that judges with torch: partials that the engine waits for go first."""


class Judging(Protocol):
    """A handle on a prompt that is being judged (`WorkerPool.judge`)."""

    def poll(self, deadline: float) -> Judgement | None:
        """Return the judgement; None while the workers have work left.

        Args:
            deadline: longest time in seconds between two calls' signs of progress.

        Raises:
            DeadlineError: the workers made no progress for ``deadline`` seconds; the message names the prompt.
            WorkerError: a worker failed, or the prompt was given up.
        """

    def abandon(self) -> None:
        """Give up the prompt. When the call returns, no worker writes to the tensors of the prompt any more."""


class Progress:
    """Watches a number that grows while workers work, and raises an error if it stands still for too long."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._steps, self._since = -1, 0.0

    def note(self, steps: int, deadline: float) -> None:
        """Take note of ``steps``, the number of steps that the workers have done so far.

        Raises:
            DeadlineError: the number has been the same for ``deadline`` seconds.
        """
        if steps != self._steps:
            self._steps, self._since = steps, time.monotonic()
        elif time.monotonic() - self._since > deadline:
            raise DeadlineError(
                f"CPU workers did nothing for {self._what} within workers.deadline_seconds={deadline}: "
                f"{steps} steps are done"
            )


class PoolJudging:
    """A prompt that native threads judge."""

    def __init__(self, job: NativeJudging, what: str) -> None:
        self._job, self._progress = job, Progress(what)

    def poll(self, deadline: float) -> Judgement | None:
        judgement = self._job.result()
        if judgement is None:
            self._progress.note(self._job.steps, deadline)
        return judgement

    def abandon(self) -> None:
        self._job.close()


class JudgeThread:
    """A nice thread that judges prompts with torch, for worker pools that have no native threads."""

    def __init__(self, cpus: Sequence[int]) -> None:
        """Prepare the thread, which starts with the first prompt and runs on ``cpus``."""
        self._cpus = list(cpus)
        self._engine_openmp_threads = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hybrid-judge", initializer=self._prepare)

    def judge(self, prompt: PromptToJudge, what: str) -> Judging:
        """Judge a prompt after all earlier ones."""
        return _ThreadJudging(self._executor, prompt, what)

    def close(self) -> None:
        """Stop the thread, after the layer that it judges."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _prepare(self) -> None:
        begin_worker(self._cpus, self._engine_openmp_threads)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def begin_worker(cpus: Sequence[int], engine_openmp_threads: int) -> None:
    """Prepare the calling thread of a pool: its name, its CPUs, and one OpenMP thread for its operations."""
    name_thread()
    os.sched_setaffinity(0, cpus)
    # vLLM replaces torch.set_num_threads by a no-op, so the C function is called. The function also sets the
    # number that new threads start with, so a short-lived thread restores the engine's number.
    torch._C.set_num_threads(1)
    restorer = threading.Thread(target=torch._C.set_num_threads, args=(engine_openmp_threads,))
    restorer.start()
    restorer.join()


class _ThreadJudging:
    def __init__(self, executor: ThreadPoolExecutor, prompt: PromptToJudge, what: str) -> None:
        self._prompt, self._what, self._progress = prompt, what, Progress(what)
        self._lock = threading.Lock()  # Held while tokens are copied.
        self._is_abandoned, self._steps = False, 0
        self._future: Future[Judgement] = executor.submit(self._run)

    def poll(self, deadline: float) -> Judgement | None:
        if self._is_abandoned:
            raise WorkerError(f"{self._what} was given up")
        if not self._future.done():
            self._progress.note(self._steps, deadline)
            return None
        try:
            return self._future.result()
        except Exception as error:
            raise WorkerError(f"a CPU worker failed on {self._what}: {error}") from error

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
        self._future.cancel()

    def _run(self) -> Judgement:
        layers = []
        with torch.inference_mode():
            for layer in self._prompt.layers:
                result = judging_oracle.judge_layer(layer, self._prompt)
                with self._lock:
                    if self._is_abandoned:
                        raise WorkerError(f"{self._what} was given up")
                    judging_oracle.copy_kept(layer, self._prompt, result[0])
                layers.append(result)
                self._steps += 1
            return judging_oracle.judgement_of(layers)
