"""The time that a profile takes is told before it, and corrected while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import StringIO

import pytest
from rich.console import Console

from hybrid_backend.tools.profile.divergence import Probe
from hybrid_backend.tools.profile.network import wrap
from hybrid_backend.tools.profile.progress import Progress, Work, duration
from tests.unit.profile.models import build


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "10 s"), (44, "40 s"), (89, "90 s"), (100, "2 min"), (420, "7 min"), (5340, "89 min"), (9000, "2.5 h")],
)
def test_durations_are_written_as_a_person_says_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@dataclass
class Log:
    """A log and a clock that a test moves."""

    console: Console = field(default_factory=lambda: Console(file=StringIO(), width=200))
    seconds: float = 0.0

    def progress(self, titles: str = "abc") -> Progress:
        """Stages of 100 operations each, an operation of which takes two seconds."""
        return Progress(self.console, dict.fromkeys(titles, 100.0), 2.0, lambda: self.seconds)

    @property
    def lines(self) -> list[str]:
        assert isinstance(self.console.file, StringIO)
        return self.console.file.getvalue().splitlines()


def test_a_stage_that_is_faster_than_estimated_shortens_what_is_left() -> None:
    log = Log()
    progress = log.progress()
    progress.announce(2)
    with progress.stage("a", 1, "step") as advance:
        log.seconds += 15  # not 200 seconds; the estimate still weighs as much as a tenth of all work
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


def test_a_log_gets_a_line_after_20_seconds_with_the_step_and_what_is_left() -> None:
    log = Log()
    with log.progress("a").stage("a", 3, "layer") as advance:
        for seconds, lines in ((15, 1), (4, 1), (1, 2)):
            log.seconds += seconds
            advance(10)
            assert len(log.lines) == lines
    left = (2.0 * 10 + 20) / (10 + 30) * 70
    assert log.lines[1:] == [f"   layer 3 of 3; about {duration(left)} left"]


def test_on_a_terminal_one_line_is_rewritten_and_gone_when_the_stage_ends() -> None:
    log = Log(Console(file=StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"}))
    with log.progress("a").stage("a", 3, "layer") as advance:
        log.seconds += 30
        advance(30)
    assert isinstance(log.console.file, StringIO)
    stage, *shown = log.console.file.getvalue().split("\n")
    assert stage.startswith("1 of 1: a;") and "layer 2 of 3" in shown[0]
    assert not any(line.startswith("   layer") for line in shown) and "\x1b[2K" in shown[-1], "the line is erased"


def test_the_estimate_is_that_of_the_fastest_of_four_passes() -> None:
    times = iter([0.0, 9, 10, 12, 20, 25, 30, 37])
    work = Work(wrap(build("llama")))
    assert work.seconds_per_operation(lambda: next(times)) * work.forward(256) == pytest.approx(2.0)


def test_the_work_of_a_set_of_layers_is_that_of_the_layers_that_are_computed() -> None:
    work = Work(wrap(build("llama")))
    probe = Probe("text", tuple(range(100)), 60, (70,))
    whole = work.sparse(probe, (0, 2))
    assert [work.sparse(probe, x) / whole for x in [(1,), {2: 64}, ()]] == pytest.approx([2 / 3, 1 / 3, 0])
    assert work.forward(200) > 2 * work.forward(100), "attention grows with the square"
