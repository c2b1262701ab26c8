"""Progress of a profile: an estimate first, a line for each stage as it begins, and the time that is left.

Work is counted in floating-point operations of the model. A short forward pass gives the first seconds per operation;
the measured steps correct them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console

from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.profile.divergence import Probe, Sparse
from hybrid_backend.tools.profile.gates import GateOptions
from hybrid_backend.tools.profile.network import Network

Clock = Callable[[], float]
Advance = Callable[[float], None]
"""Function to call after a measured step, with the operations of the step."""

_TIMED_TOKENS, _TIMED_PASSES = 256, 4
_PRIOR = 0.1
"""Share of all work that the first estimate weighs as much as, once stages are measured."""
# Factors of a forward pass's seconds for as many operations (docs/lab/profile.md#quick-and-thorough).
_WINDOW, _SPARSE, _TRAINING = 1.8, 2.0, 4.0
_LINE_SECONDS = 20.0
"""Seconds of silence after which a log gets a line."""


@dataclass(frozen=True)
class Work:
    """Estimated arithmetic operations of each kind of measurement, from the model's shape."""

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

    def seconds_per_operation(self, clock: Clock = time.perf_counter) -> float:
        """Time short forward passes; return the seconds of an operation in the fastest one."""
        ids = [0] * min(_TIMED_TOKENS, self.network.max_context)
        passes = []
        with torch.inference_mode():
            for _ in range(_TIMED_PASSES):
                started = clock()
                self.network.hidden(ids)[0, 0].item()
                passes.append(clock() - started)
        return min(passes) / self.forward(len(ids))

    def _operations(self, tokens: int, context: float) -> float:
        weights = sum(p.numel() for layer in self.network.layers for p in layer.module.parameters())
        pairs = self.network.heads * self.network.head_dim * len(self.network.layers)
        return tokens * (2 * weights + 4 * pairs * context)


class Progress:
    """Prints the stages as they begin and the step that is measured, with the time that is left for all stages.

    On a terminal the line of the step is rewritten in place. A log gets such a line after `_LINE_SECONDS` of silence.
    """

    def __init__(
        self,
        console: Console,
        plan: Mapping[str, float],
        seconds_per_operation: float,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Plan the stages: ``plan`` has the operations of each by title."""
        self._console, self._clock = console, clock
        self._plan, self._stages, self._number, self._title = dict(plan), len(plan), 0, ""
        # Once steps are measured, the first estimate counts as if it were a measurement of this size.
        self._work = max(1.0, _PRIOR * sum(plan.values()))
        self._seconds = seconds_per_operation * self._work
        self._last_line = clock()

    @property
    def left(self) -> str:
        """Estimate for all that is not measured yet."""
        return f"about {duration(self._seconds * sum(self._plan.values()) / self._work)}"

    def announce(self, threads: int) -> None:
        """Say how long all stages take together."""
        self.line(f"{self.left} on {counted(threads, 'thread')}, in {self._stages} stages")

    def line(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._last_line = self._clock()

    @contextmanager
    def stage(self, title: str, steps: int, noun: str) -> Iterator[Advance]:
        """Begin the stage of that title, or go on with it; stages that were planned before it are left out.

        ``noun`` is the name of one of its ``steps``, as in ``layer 7 of 30``.
        """
        if title != self._title:
            self._begin(title)
        done, last = 0, self._clock()

        def text() -> str:
            return f"{noun} {min(done + 1, steps)} of {steps}; {self.left} left"

        def advance(work: float) -> None:
            nonlocal done, last
            last, seconds = self._clock(), self._clock() - last
            self._work, self._seconds = self._work + work, self._seconds + seconds
            self._plan[title] = max(0.0, self._plan[title] - work)
            done += 1
            status.update(text())
            if not self._console.is_terminal and last - self._last_line >= _LINE_SECONDS:
                self.line(f"   {text()}")

        with self._console.status(text()) as status:
            yield advance

    def _begin(self, title: str) -> None:
        self._plan.pop(self._title, None)
        while title in self._plan and next(iter(self._plan)) != title:
            del self._plan[next(iter(self._plan))]
            self._number += 1
        self._plan.setdefault(title, 0.0)
        self._title, self._number = title, self._number + 1
        self._stages = max(self._stages, self._number)
        self.line(f"{self._number} of {self._stages}: {title}; {self.left} left")


def duration(seconds: float) -> str:
    """Format a duration as a person says it: ``40 s``, ``3 min``, ``1.5 h``."""
    if seconds < 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
