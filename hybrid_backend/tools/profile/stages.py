"""The stages of a profile and the time that is left: an estimate, a line for each stage, lines within a long stage.

Work is counted in floating-point operations of the model. A short forward pass gives the seconds per operation at
first; the parts that were measured correct them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from rich.console import Console

from hybrid_backend.tools.profile.divergence import Probe, Sparse
from hybrid_backend.tools.profile.gates import GateOptions
from hybrid_backend.tools.profile.network import Network

_TIMED_TOKENS, _TIMED_PASSES = 256, 4
_PRIOR = 0.1
"""Share of all work that the first estimate weighs as much as, once stages are measured."""
# Seconds beside those of a forward pass with as many operations (docs/profile.md#quick-and-thorough).
_WINDOW, _SPARSE, _TRAINING = 1.8, 2.0, 4.0
_LINE_SECONDS = 20.0
"""Seconds of silence after which a log gets a line."""
_BUSY_SHARE = 0.6
"""Share of its time that the measuring thread runs; below it, other programs have the cores."""
_BUSY_SECONDS = 10.0
"""Seconds of measurement that tell whether the machine is busy."""
_COLUMNS = 80


@dataclass(frozen=True)
class Clock:
    """Seconds that have passed, and seconds in which the calling thread had a core.

    ``tick_seconds``: between two looks at what a stage may have to say.
    """

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.thread_time
    tick_seconds: float = 1.0


@dataclass
class Pace:
    """Seconds that ``work`` operations took. ``cpu``: those in which the measuring thread had a core.

    The measuring thread computes its part of every parallel region and all that is not parallel. On a quiet machine
    ``cpu`` is therefore nearly ``wall``, whatever the number of threads is.
    """

    work: float
    wall: float
    cpu: float

    @property
    def share(self) -> float:
        """Share of the time in which the measuring thread had a core."""
        return self.cpu / self.wall if self.wall > 0 else 1.0

    def scaled(self, work: float) -> Pace:
        """Return what other ``work`` takes at this pace."""
        return Pace(work, self.wall * work / self.work, self.cpu * work / self.work)

    def add(self, other: Pace) -> None:
        """Count what was measured in addition."""
        self.work, self.wall, self.cpu = self.work + other.work, self.wall + other.wall, self.cpu + other.cpu


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

    def pace(self, clock: Clock) -> Pace:
        """Time a short forward pass: the fastest of a few, as other processes can disturb each."""
        ids = torch.zeros(1, min(_TIMED_TOKENS, self.network.max_context), dtype=torch.long, device=self.network.device)
        wall, cpu = [], []
        with torch.inference_mode():
            for _ in range(_TIMED_PASSES):
                wall_before, cpu_before = clock.wall(), clock.cpu()
                self.network.decoder(ids, use_cache=False).last_hidden_state[0, 0, 0].item()
                wall.append(clock.wall() - wall_before)
                cpu.append(clock.cpu() - cpu_before)
        return Pace(self.forward(ids.shape[1]), min(wall), min(cpu))

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


@dataclass
class _Part:
    """The part of a stage that is being measured: ``done`` of the ``steps`` are, each is one ``noun``."""

    noun: str
    steps: int
    done: int = 0

    def __str__(self) -> str:
        return f"{self.noun} {min(self.done + 1, self.steps)} of {self.steps}"


@dataclass
class _Progress:
    """Measurements of this run so far, and the work that is left of the current stage."""

    pace: Pace
    title: str = ""
    work_left: float = 0.0
    is_busy_told: bool = False
    measured: Pace = field(default_factory=lambda: Pace(0.0, 0.0, 0.0))


class Stages:
    """Prints the stages as they begin, and their parts while they last, with the time that is left for all of them.

    A log gets a line after `_LINE_SECONDS` of silence; on a terminal one line is rewritten in place.
    """

    def __init__(self, console: Console, planned: Sequence[Stage], pace: Pace, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._screen = _Screen(console, self._clock)
        self._planned = list(planned)
        self._count, self._begun = len(self._planned), 0
        # Once stages are measured, the first estimate counts as if it were a measurement of this size.
        prior = pace.scaled(max(1.0, _PRIOR * sum(stage.work for stage in planned)))
        self._progress = _Progress(prior)

    @property
    def left(self) -> Pace:
        """Estimate for what is not measured yet."""
        work = self._progress.work_left + sum(stage.work for stage in self._planned)
        return self._progress.pace.scaled(work)

    def announce(self, threads: int) -> None:
        """Say how long all stages take together."""
        where = f"on {threads} thread{'s' if threads > 1 else ''}"
        self._screen.line(f"about {duration(self.left.wall)} {where}, in {self._count} stages")
        self._tell_busy(self._progress.pace)

    @contextmanager
    def stage(self, title: str, steps: int, noun: str = "step") -> Iterator[Callable[[float], None]]:
        """Begin the stage of that title, or go on with it; stages that were planned before it are left out.

        Args:
            title: of the stage.
            steps: that will be measured.
            noun: what each step is, as in ``layer 7 of 30``.

        Yields:
            A function to call after each of the ``steps`` that was measured, with its work.
        """
        if title != self._progress.title:
            self._begin(title)
        part = _Part(noun, steps)
        wall, cpu = self._clock.wall(), self._clock.cpu()

        def advance(work: float) -> None:
            nonlocal wall, cpu
            wall_before, cpu_before, wall, cpu = wall, cpu, self._clock.wall(), self._clock.cpu()
            step = Pace(work, wall - wall_before, cpu - cpu_before)
            progress = self._progress
            progress.pace.add(step)
            progress.measured.add(step)
            progress.work_left = max(0.0, progress.work_left - work)
            part.done += 1
            if progress.measured.wall >= _BUSY_SECONDS:
                self._tell_busy(progress.measured)
            self.tell(part)

        with self._screen.ticking(lambda: self.tell(part)):
            yield advance

    def tell(self, part: object) -> None:
        """Say which part is measured and what is left, if the screen is due for it."""
        self._screen.update(f"   {part}; about {duration(self.left.wall)} left")

    def _tell_busy(self, pace: Pace) -> None:
        """Say once that other programs have the cores, if the pace shows it."""
        if pace.share >= _BUSY_SHARE or self._progress.is_busy_told:
            return
        self._progress.is_busy_told = True
        quiet = duration(self.left.cpu)
        self._screen.line(f"the cores are busy, {pace.share:.0%} is left for this; about {quiet} on a quiet machine")

    def _begin(self, title: str) -> None:
        titles = [stage.title for stage in self._planned]
        self._progress.work_left = 0.0
        if title in titles:
            skipped = titles.index(title)
            self._begun += skipped
            del self._planned[:skipped]
            self._progress.work_left = self._planned.pop(0).work
        self._progress.title, self._begun = title, self._begun + 1
        self._count = max(self._count, self._begun)
        first, last = f"{self._begun} of {self._count}: ", f"; about {duration(self.left.wall)} left"
        self._screen.line(first + shortened(title, _COLUMNS - len(first) - len(last)) + last)


class _Screen:
    """Lines on a console. The thread that measures and the thread that ticks write them."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console, self._clock = console, clock
        self._rewrites = console.is_terminal and not console.is_dumb_terminal
        self._lock = threading.Lock()
        self._last = clock.wall()
        self._shown = ""

    def line(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._clear()
            self._print(text)

    def update(self, text: str) -> None:
        """Show a line of progress: in place on a terminal, else as a line if the last one is long ago."""
        text = shortened(text, _COLUMNS)
        with self._lock:
            if self._rewrites:
                if text != self._shown:
                    self._clear()
                    self._console.file.write(text[: self._console.width - 1])
                    self._console.file.flush()
                    self._shown = text
            elif self._clock.wall() - self._last >= _LINE_SECONDS:
                self._print(text)

    @contextmanager
    def ticking(self, tick: Callable[[], None]) -> Iterator[None]:
        """Call ``tick`` again and again from another thread, so that a long step is not silent either."""
        is_done = threading.Event()

        def run() -> None:
            while not is_done.wait(self._clock.tick_seconds):
                tick()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()
            with self._lock:
                self._clear()

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._last = self._clock.wall()

    def _clear(self) -> None:
        """Erase the line that is rewritten in place."""
        if self._shown:
            self._console.file.write("\r\x1b[2K")
            self._console.file.flush()
            self._shown = ""


def shortened(text: str, columns: int) -> str:
    """Return ``text`` in at most so many columns, its middle left out if need be."""
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
