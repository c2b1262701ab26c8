"""The time that a profile takes is told before it, and corrected while it runs."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from hybrid_backend.tools.profile.divergence import Probe
from hybrid_backend.tools.profile.network import wrap
from hybrid_backend.tools.profile.stages import Stage, Stages, Work, duration
from tests.unit.profile.models import build


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "10 s"), (44, "40 s"), (89, "90 s"), (100, "2 min"), (420, "7 min"), (5340, "89 min"), (9000, "2.5 h")],
)
def test_durations_are_written_as_a_person_says_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_a_stage_that_is_faster_than_estimated_shortens_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 30.0, 30.0])
    monkeypatch.setattr("hybrid_backend.tools.profile.stages.time.perf_counter", lambda: next(clock))
    console = Console(file=StringIO(), width=200)
    stages = Stages(console, [Stage("a", 100), Stage("b", 100), Stage("c", 100)], seconds_per_operation=2.0)
    stages.announce(2)
    with stages.stage("a", 1) as advance:
        advance(100)  # 30 seconds, not 200; the estimate still weighs as much as a tenth of all work
    with stages.stage("b", 1):
        pass
    rate = (2.0 * 30 + 30) / (30 + 100)
    assert lines(console) == [
        "about 10 min on 2 threads, in 3 stages",
        "1 of 3: a; about 10 min left",
        f"2 of 3: b; about {duration(200 * rate)} left",
    ]


def test_a_stage_is_told_once_and_those_that_were_left_out_are_counted() -> None:
    console = Console(file=StringIO(), width=200)
    stages = Stages(console, [Stage(title, 1.0) for title in "abcd"], 1.0)
    for title in ("a", "c", "c", "d", "more"):
        with stages.stage(title, 1):
            pass
    assert [line.partition(";")[0] for line in lines(console)] == [
        "1 of 4: a",
        "3 of 4: c",
        "4 of 4: d",
        "5 of 5: more",
    ]


def test_the_work_of_a_set_of_layers_is_that_of_the_layers_that_are_computed() -> None:
    work = Work(wrap(build("llama")))
    probe = Probe("text", tuple(range(100)), 60, (70,))
    assert [work.share(layers) for layers in [(0, 2), (1,), {2: 64}, ()]] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert work.sparse(probe, 0.5) == work.sparse(probe, 1) / 2 > 0
    assert work.forward(200) > 2 * work.forward(100), "attention grows with the square"
    assert work.seconds_per_operation() > 0
