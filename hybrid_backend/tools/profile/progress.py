"""Progress of a profile: an estimate first, a line for each stage as it begins, and the time that is left.

Work is counted in floating-point operations of the model. A short forward pass gives the first seconds per operation;
the measured steps correct them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.profile.divergence import Probe, Sparse
from hybrid_backend.tools.profile.gates import GateOptions
from hybrid_backend.tools.profile.network import Network

Seconds = NDArray[np.float64]
"""Seconds that have passed, and seconds in which the measuring thread had a core."""
Clock = Callable[[], Seconds]
Advance = Callable[[float], None]
"""Function to call after a measured step, with the operations of the step."""

_TIMED_TOKENS, _TIMED_PASSES = 256, 4
_PRIOR = 0.1
"""Share of all work that the first estimate weighs as much as, once stages are measured."""
# Factors of a forward pass's seconds for as many operations (docs/profile.md#quick-and-thorough).
_WINDOW, _SPARSE, _TRAINING = 1.8, 2.0, 4.0
_LINE_SECONDS = 20.0
"""Seconds of silence after which a log gets a line."""
_BUSY_SHARE = 0.6
"""Share of the time that the measuring thread has a core; below it, other programs have the cores."""
_BUSY_SECONDS = 10.0
"""Seconds of measurement that show whether the machine is busy."""
_COLUMNS = 80


def clock() -> Seconds:
    """Read the clocks.

    The measuring thread computes its part of every parallel region and all that is not parallel. On a quiet machine
    both times are therefore nearly equal, whatever the number of threads is.
    """
    return np.array([time.perf_counter(), time.thread_time()])


@dataclass(frozen=True)
class Work:
    """Operations that measurements take, as far as the model's shape tells."""

    network: Network

    def forward(self, tokens: int) -> float:
        return self._operations(tokens, tokens / 2)

    def window(self, tokens: int) -> float:
        return _WINDOW * self.forward(tokens)

    def sparse(self, probe: Probe, sparse: Sparse) -> float:
        """Return the operations of a set of sparse layers on a probe; layers before the first one are not computed."""
        layers, context = len(self.network.layers), len(probe.ids)
        share = 1 - min(sparse, default=layers) / layers
        return _SPARSE * share * self._operations(context - probe.prompt_tokens, context)

    def training(self, gates: GateOptions) -> float:
        return _TRAINING * self.forward(gates.context)

    def time(self, clock: Clock = clock) -> tuple[float, Seconds]:
        """Time short forward passes; return the operations and the seconds of the fastest one."""
        ids = [0] * min(_TIMED_TOKENS, self.network.max_context)
        passes = []
        with torch.inference_mode():
            for _ in range(_TIMED_PASSES):
                started = clock()
                self.network.hidden(ids)[0, 0].item()
                passes.append(clock() - started)
        return self.forward(len(ids)), np.min(passes, axis=0)

    def _operations(self, tokens: int, context: float) -> float:
        weights = sum(p.numel() for layer in self.network.layers for p in layer.module.parameters())
        pairs = self.network.heads * self.network.head_dim * len(self.network.layers)
        return tokens * (2 * weights + 4 * pairs * context)


class Progress:
    """Prints the stages as they begin and the step that is measured, with the time that is left for all stages.

    A log gets a line after `_LINE_SECONDS` of silence; on a terminal one line is rewritten in place.
    """

    def __init__(
        self,
        console: Console,
        plan: Mapping[str, float],
        timed: tuple[float, Seconds],
        clock: Clock = clock,
        tick_seconds: float = 1.0,
    ) -> None:
        """Plan the stages: ``plan`` has the operations of each by title, ``timed`` is the result of `Work.time`."""
        self._console, self._clock, self._tick_seconds = console, clock, tick_seconds
        self._plan, self._stages, self._number, self._title = dict(plan), len(plan), 0, ""
        # Once steps are measured, the first estimate counts as if it were a measurement of this size.
        self._work = max(1.0, _PRIOR * sum(plan.values()))
        self._seconds = timed[1] * self._work / timed[0]
        self._measured = np.zeros(2)
        self._is_busy_told = False
        self._last_line = clock()[0]

    @property
    def left(self) -> Seconds:
        """Estimate for all that is not measured yet."""
        return self._seconds * sum(self._plan.values()) / self._work

    def announce(self, threads: int) -> None:
        """Say how long all stages take together."""
        self.line(f"about {duration(self.left[0])} on {counted(threads, 'thread')}, in {self._stages} stages")
        self._tell_busy(self._seconds)

    def line(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._last_line = self._clock()[0]

    @contextmanager
    def stage(self, title: str, steps: int, noun: str) -> Iterator[Advance]:
        """Begin the stage of that title, or go on with it; stages that were planned before it are left out.

        ``noun`` is the name of one of its ``steps``, as in ``layer 7 of 30``.
        """
        if title != self._title:
            self._begin(title)
        done, seconds = 0, self._clock()

        def advance(work: float) -> None:
            nonlocal done, seconds
            step = self._clock() - seconds
            seconds = seconds + step
            self._work, self._seconds = self._work + work, self._seconds + step
            self._measured = self._measured + step
            self._plan[title] = max(0.0, self._plan[title] - work)
            done += 1
            if self._measured[0] >= _BUSY_SECONDS:
                self._tell_busy(self._measured)

        def text() -> str:
            return f"   {noun} {min(done + 1, steps)} of {steps}; about {duration(self.left[0])} left"

        with self._shown(text):
            yield advance

    def _begin(self, title: str) -> None:
        self._plan.pop(self._title, None)
        while title in self._plan and next(iter(self._plan)) != title:
            del self._plan[next(iter(self._plan))]
            self._number += 1
        self._plan.setdefault(title, 0.0)
        self._title, self._number = title, self._number + 1
        self._stages = max(self._stages, self._number)
        first, last = f"{self._number} of {self._stages}: ", f"; about {duration(self.left[0])} left"
        self.line(first + shortened(title, _COLUMNS - len(first) - len(last)) + last)

    @contextmanager
    def _shown(self, text: Callable[[], str]) -> Iterator[None]:
        """Show ``text()`` while the block runs, from another thread, so that a long step is not silent either."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            with Live(
                console=self._console,
                get_renderable=lambda: Text(text(), no_wrap=True, overflow="ellipsis"),
                refresh_per_second=1 / self._tick_seconds,
                transient=True,
            ):
                yield
            return
        is_done = Event()

        def tick() -> None:
            while not is_done.wait(self._tick_seconds):
                if self._clock()[0] - self._last_line >= _LINE_SECONDS:
                    self.line(text())

        thread = Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()

    def _tell_busy(self, seconds: Seconds) -> None:
        """Say once that other programs have the cores, if the seconds show it."""
        share = seconds[1] / seconds[0] if seconds[0] > 0 else 1.0
        if share < _BUSY_SHARE and not self._is_busy_told:
            self._is_busy_told = True
            quiet = duration(self.left[1])
            self.line(f"the cores are busy, {share:.0%} is left for this; about {quiet} on a quiet machine")


def shortened(text: str, columns: int) -> str:
    """Return ``text`` in at most ``columns`` columns, without its middle if need be."""
    if len(text) <= columns:
        return text
    last = (columns - 1) // 2
    return f"{text[: columns - 1 - last]}…{text[len(text) - last :]}"


def duration(seconds: float) -> str:
    """Format a duration as a person says it: ``40 s``, ``3 min``, ``1.5 h``."""
    if seconds < 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
