"""The time that a profile takes is told before it, and corrected while it runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from hybrid_backend.tools.profile.divergence import Probe
from hybrid_backend.tools.profile.network import wrap
from hybrid_backend.tools.profile.progress import Progress, Seconds, Work, duration, shortened
from tests.unit.profile.models import build


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "10 s"), (44, "40 s"), (89, "90 s"), (100, "2 min"), (420, "7 min"), (5340, "89 min"), (9000, "2.5 h")],
)
def test_durations_are_written_as_a_person_says_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@dataclass
class Log:
    """A log and a clock whose hands a test moves."""

    console: Console = field(default_factory=lambda: Console(file=StringIO(), width=200))
    hands: Seconds = field(default_factory=lambda: np.zeros(2))

    def progress(
        self, titles: str = "abc", wall: float = 2.0, cpu: float = 2.0, tick_seconds: float = 3600.0
    ) -> Progress:
        """Stages of 100 operations each, and the seconds of one operation."""
        plan = dict.fromkeys(titles, 100.0)
        return Progress(self.console, plan, (1.0, np.array([wall, cpu])), lambda: self.hands, tick_seconds)

    def pass_by(self, wall: float, cpu: float | None = None) -> None:
        self.hands = self.hands + np.array([wall, wall if cpu is None else cpu])

    @property
    def lines(self) -> list[str]:
        assert isinstance(self.console.file, StringIO)
        return self.console.file.getvalue().splitlines()


def test_a_stage_that_is_faster_than_estimated_shortens_what_is_left() -> None:
    log = Log()
    progress = log.progress()
    progress.announce(2)
    with progress.stage("a", 1, "step") as advance:
        log.pass_by(15.0)  # not 200 seconds; the estimate still weighs as much as a tenth of all work
        advance(100)
    with progress.stage("b", 1, "step"):
        pass
    rate = (2.0 * 30 + 15) / (30 + 100)
    assert log.lines == [
        "about 10 min on 2 threads, in 3 stages",
        "1 of 3: a; about 10 min left",
        f"2 of 3: b; about {duration(200 * rate)} left",
    ]


def test_a_stage_is_told_once_and_those_that_were_left_out_are_counted() -> None:
    log = Log()
    progress = log.progress("abcd")
    for title in ("a", "c", "c", "d", "more"):
        with progress.stage(title, 1, "step"):
            pass
    assert [line.partition(";")[0] for line in log.lines] == ["1 of 4: a", "3 of 4: c", "4 of 4: d", "5 of 5: more"]


def test_a_log_gets_a_line_of_a_long_step_after_20_seconds_with_its_part_and_what_is_left() -> None:
    wrote = threading.Event()

    class Watched(StringIO):
        def write(self, text: str) -> int:
            if "layer" in text:
                wrote.set()
            return super().write(text)

    log = Log(Console(file=Watched(), width=200))
    with log.progress("a", tick_seconds=0.001).stage("a", 3, "layer") as advance:
        log.pass_by(15.0)
        advance(30)
        log.pass_by(4.0)
        assert not wrote.wait(0.2), "19 seconds of silence are no reason to write"
        log.pass_by(1.0)
        assert wrote.wait(30.0)
    left = (2.0 * 10 + 15) / (10 + 30) * 70
    assert log.lines[1:] == [f"   layer 2 of 3; about {duration(left)} left"]


def test_on_a_terminal_one_line_is_rewritten_and_gone_when_the_stage_ends() -> None:
    log = Log(Console(file=StringIO(), width=40, force_terminal=True, _environ={"TERM": "xterm"}))
    with log.progress("a").stage("a", 3, "a layer with a name longer than the line") as advance:
        advance(30)
    assert isinstance(log.console.file, StringIO)
    stage, *shown = log.console.file.getvalue().split("\n")
    assert stage.startswith("1 of 1: a;") and "…" in shown[0]
    assert "\x1b[2K" in shown[-1].rpartition("…")[2], "the line is erased"


def test_the_line_of_a_stage_is_not_longer_than_80_columns() -> None:
    log = Log()
    title = f"held-out text: attention in {'a-text-with-a-long-name' * 3} @54429 +4096"
    with Progress(log.console, {title: 1e6}, (1.0, np.array([10.0, 1.0]))).stage(title, 1, "step"):
        pass
    assert len(log.lines[0]) <= 80
    assert log.lines[0].startswith("1 of 1: held-out text: ") and "@54429 +4096; about" in log.lines[0]


def test_a_long_text_loses_its_middle() -> None:
    assert shortened("0123456789", 10) == "0123456789"
    assert shortened("0123456789", 7) == "012…789"
    assert [len(shortened("0123456789", columns)) for columns in range(1, 12)] == [*range(1, 11), 10]


def test_a_busy_machine_is_told_once_with_the_estimate_for_a_quiet_one() -> None:
    log = Log()
    progress = log.progress("ab", 4.0, 1.0)
    progress.announce(2)
    with progress.stage("a", 2, "step") as advance:
        for _ in range(2):
            log.pass_by(15.0, 3.0)
            advance(50)
    busy = "the cores are busy, 25% is left for this; about 3 min on a quiet machine"
    assert log.lines == ["about 13 min on 2 threads, in 2 stages", busy, "1 of 2: a; about 13 min left"]


def test_a_machine_that_becomes_busy_is_told_when_ten_seconds_show_it() -> None:
    log = Log()
    with log.progress("ab").stage("a", 3, "step") as advance:
        log.pass_by(9.0, 3.0)
        advance(10)
        assert "busy" not in log.lines[-1]
        log.pass_by(9.0, 3.0)
        advance(10)
    quiet = (2.0 * 20 + 6) / (20 + 20) * 180
    assert log.lines[1] == f"the cores are busy, 33% is left for this; about {duration(quiet)} on a quiet machine"


def test_a_quiet_machine_is_not_called_busy() -> None:
    log = Log()
    progress = log.progress("a", 1.0, 0.8)
    progress.announce(2)
    with progress.stage("a", 2, "step") as advance:
        log.pass_by(50.0, 40.0)
        advance(50)
    assert not any("busy" in line for line in log.lines)


def test_the_estimate_is_that_of_the_fastest_of_four_passes() -> None:
    times = iter(np.array([[0, 0], [9, 2], [10, 2], [12, 3], [20, 3], [25, 4], [30, 4], [37, 5]], dtype=float))
    work = Work(wrap(build("llama")))
    operations, seconds = work.time(lambda: next(times))
    assert operations == work.forward(256) and seconds.tolist() == [2.0, 1.0]


def test_the_work_of_a_set_of_layers_is_that_of_the_layers_that_are_computed() -> None:
    work = Work(wrap(build("llama")))
    probe = Probe("text", tuple(range(100)), 60, (70,))
    whole = work.sparse(probe, (0, 2))
    assert [work.sparse(probe, x) / whole for x in [(1,), {2: 64}, ()]] == pytest.approx([2 / 3, 1 / 3, 0])
    assert work.forward(200) > 2 * work.forward(100), "attention grows with the square"
