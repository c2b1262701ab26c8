"""The stages of a profile and the time that is left: an estimate before the first stage, a line for each stage.

Work is counted in floating-point operations of the model. A short forward pass gives the seconds per operation at
first; the stages that were measured correct them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hybrid_backend.tools.profile.divergence import Probe, Sparse
from hybrid_backend.tools.profile.gates import GateOptions
from hybrid_backend.tools.profile.network import Network

_TIMED_TOKENS, _TIMED_PASSES = 256, 4
_PRIOR = 0.1
"""Share of all work that the first estimate weighs as much as, once stages are measured."""
# Seconds beside those of a forward pass with as many operations (docs/profile.md#quick-and-thorough).
_WINDOW, _SPARSE, _TRAINING = 1.8, 2.0, 4.0


@dataclass(frozen=True)
class Work:
    """Operations that a profile's measurements take, as far as the model's shape tells."""

    network: Network

    def forward(self, tokens: int) -> float:
        """A dense forward pass over a prompt."""
        return self._matrices * tokens + self._pairs * tokens**2 / 2

    def window(self, tokens: int) -> float:
        """All layers of a window, with selections, masses and simulated residency."""
        return _WINDOW * self.forward(tokens)

    def sparse(self, probe: Probe, share: float) -> float:
        """Return the operations of one set of sparse layers on a probe. ``share``: of the layers that are computed."""
        tokens, context = len(probe.ids) - probe.given, len(probe.ids)
        return _SPARSE * share * (self._matrices * tokens + self._pairs * tokens * context)

    def share(self, sparse: Sparse) -> float:
        """The share of the layers that a set of sparse layers computes: those from its first one on."""
        return 1 - min(sparse, default=len(self.network.layers)) / len(self.network.layers)

    def training(self, gates: GateOptions) -> float:
        """Return the operations of one step of training gates."""
        return _TRAINING * self.forward(gates.context)

    def seconds_per_operation(self) -> float:
        """Time a short forward pass: the fastest of a few, as other processes can disturb each."""
        ids = torch.zeros(1, min(_TIMED_TOKENS, self.network.max_context), dtype=torch.long, device=self.network.device)
        seconds = []
        with torch.inference_mode():
            for _ in range(_TIMED_PASSES):
                started = time.perf_counter()
                self.network.decoder(ids, use_cache=False).last_hidden_state[0, 0, 0].item()
                seconds.append(time.perf_counter() - started)
        return min(seconds) / self.forward(ids.shape[1])

    @property
    def _matrices(self) -> int:
        """Operations per token in the layers' matrices."""
        return 2 * sum(p.numel() for layer in self.network.layers for p in layer.module.parameters())

    @property
    def _pairs(self) -> int:
        """Operations per query token and key, in all layers together."""
        return 4 * self.network.heads * self.network.head_dim * len(self.network.layers)


@dataclass
class Stage:
    """A stage that is planned. ``work``: operations of all of its steps, an estimate."""

    title: str
    work: float


class Stages:
    """Prints the stages as they begin, with the time that is left for all of them."""

    def __init__(self, console: Console, planned: Sequence[Stage], seconds_per_operation: float) -> None:
        self._console, self._planned = console, list(planned)
        self._count, self._begun = len(self._planned), 0
        self._prior_work = max(1.0, _PRIOR * sum(stage.work for stage in planned))
        self._measured_work, self._measured_seconds = 0.0, 0.0
        self._rate = seconds_per_operation
        self._current = ""

    @property
    def seconds_left(self) -> float:
        """Estimate for the stages that have not begun."""
        return self._seconds(sum(stage.work for stage in self._planned))

    def announce(self, threads: int) -> None:
        """Say how long all stages take together."""
        where = f"on {threads} thread{'s' if threads > 1 else ''}"
        self._print(f"about {duration(self.seconds_left)} {where}, in {self._count} stages")

    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Callable[[float], None]]:
        """Begin the stage of that title, or go on with it; stages that were planned before it are left out.

        Yields:
            A function to call after each of the ``steps`` that was measured, with its work.
        """
        if title != self._current:
            self._begin(title)
        columns = (TextColumn("  "), BarColumn(), MofNCompleteColumn())
        progress = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        last = time.perf_counter()
        with progress:
            task = progress.add_task("", total=steps)

            def advance(work: float) -> None:
                nonlocal last
                progress.advance(task)
                seconds = time.perf_counter() - last
                last += seconds
                self._measured_seconds += seconds
                self._measured_work += work

            yield advance

    def _begin(self, title: str) -> None:
        titles = [stage.title for stage in self._planned]
        if title in titles:
            skipped = titles.index(title)
            self._begun += skipped
            del self._planned[:skipped]
        left = self.seconds_left
        if title in titles:
            self._planned.pop(0)
        self._current, self._begun = title, self._begun + 1
        self._count = max(self._count, self._begun)
        self._print(f"{self._begun} of {self._count}: {title}; about {duration(left)} left")

    def _seconds(self, work: float) -> float:
        measured = self._rate * self._prior_work + self._measured_seconds
        return work * measured / (self._prior_work + self._measured_work)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format a duration as a person says it: ``40 s``, ``3 min``, ``1.5 h``."""
    if seconds < 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
