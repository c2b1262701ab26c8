"""The time that a profile takes is told before it, and corrected while it runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from io import StringIO

import pytest
from rich.console import Console

from hybrid_backend.tools.profile.divergence import Probe
from hybrid_backend.tools.profile.network import wrap
from hybrid_backend.tools.profile.stages import Clock, Pace, Stage, Stages, Work, duration, shortened
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


@dataclass
class Hands:
    """A clock whose hands a test moves. It does not tick by itself, unless ``tick_seconds`` is short."""

    wall: float = 0.0
    cpu: float = 0.0
    tick_seconds: float = 3600.0

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.cpu, self.tick_seconds)

    def pass_by(self, wall: float, cpu: float | None = None) -> None:
        self.wall, self.cpu = self.wall + wall, self.cpu + (wall if cpu is None else cpu)


class Terminal(StringIO):
    """A screen that keeps what is written."""

    def isatty(self) -> bool:
        return True


def log() -> Console:
    return Console(file=StringIO(), width=200)


def made(console: Console, hands: Hands, titles: str = "abc", wall: float = 2.0, cpu: float = 2.0) -> Stages:
    """Stages of 100 operations each, and the seconds of one operation."""
    return Stages(console, [Stage(title, 100) for title in titles], Pace(1.0, wall, cpu), hands.clock())


def test_a_stage_that_is_faster_than_estimated_shortens_what_is_left() -> None:
    console, hands = log(), Hands()
    stages = made(console, hands)
    stages.announce(2)
    with stages.stage("a", 1) as advance:
        hands.pass_by(15.0)  # not 200 seconds; the estimate still weighs as much as a tenth of all work
        advance(100)
    with stages.stage("b", 1):
        pass
    rate = (2.0 * 30 + 15) / (30 + 100)
    assert lines(console) == [
        "about 10 min on 2 threads, in 3 stages",
        "1 of 3: a; about 10 min left",
        f"2 of 3: b; about {duration(200 * rate)} left",
    ]


def test_a_stage_is_told_once_and_those_that_were_left_out_are_counted() -> None:
    console = log()
    stages = made(console, Hands(), "abcd")
    for title in ("a", "c", "c", "d", "more"):
        with stages.stage(title, 1):
            pass
    assert [line.partition(";")[0] for line in lines(console)] == [
        "1 of 4: a",
        "3 of 4: c",
        "4 of 4: d",
        "5 of 5: more",
    ]


def test_a_log_gets_a_line_of_a_long_stage_every_20_seconds_with_its_part_and_what_is_left_at_the_pace_so_far() -> None:
    console, hands = log(), Hands()
    stages = made(console, hands, "ab")
    with stages.stage("a", 20, "layer") as advance:
        for _ in range(9):
            hands.pass_by(5.0)
            advance(5)
    told = [(4, 20.0), (8, 40.0)]  # layers that were measured, and the seconds that they took
    left = [(2.0 * 20 + seconds) / (20 + 5 * layers) * (200 - 5 * layers) for layers, seconds in told]
    assert lines(console)[1:] == [
        f"   layer 5 of 20; about {duration(left[0])} left",
        f"   layer 9 of 20; about {duration(left[1])} left",
    ]


def test_a_step_that_takes_long_is_told_too_while_it_lasts() -> None:
    console, hands = log(), Hands()
    stages = made(console, hands, "a")
    with stages.stage("a", 3, "layer"):
        hands.pass_by(19.0)
        stages.tell("layer 1 of 3")
        assert len(lines(console)) == 1
        hands.pass_by(1.0)
        stages.tell("layer 1 of 3")
        stages.tell("layer 1 of 3")
    assert lines(console)[1:] == ["   layer 1 of 3; about 3 min left"]


def test_the_thread_that_ticks_tells_the_part_that_is_measured() -> None:
    wrote = threading.Event()

    class Log(StringIO):
        def write(self, text: str) -> int:
            if "layer 2 of 3" in text:
                wrote.set()
            return super().write(text)

    console, hands = Console(file=Log(), width=200), Hands(tick_seconds=0.001)
    with made(console, hands, "a").stage("a", 3, "layer") as advance:
        advance(30)
        hands.pass_by(30.0)
        assert wrote.wait(30.0), "nothing but the ticking thread writes here"


def test_on_a_terminal_one_line_is_rewritten_and_gone_when_the_stage_ends() -> None:
    console, hands = Console(file=Terminal(), width=200, force_terminal=True, _environ={"TERM": "xterm"}), Hands()
    stages = made(console, hands, "a")
    with stages.stage("a", 3, "layer") as advance:
        for _ in range(2):
            hands.pass_by(1.0)
            advance(30)
    assert isinstance(console.file, Terminal)
    stage, rewritten = console.file.getvalue().split("\n")
    shown = [text for text in rewritten.split("\r\x1b[2K") if text]
    assert stage.startswith("1 of 1: a;")
    assert [text.partition(";")[0].strip() for text in shown] == ["layer 2 of 3", "layer 3 of 3"]
    assert rewritten.endswith("\r\x1b[2K")


def test_no_line_is_longer_than_80_columns() -> None:
    console, hands = log(), Hands()
    title = f"held-out text: attention in {'a-text-with-a-long-name' * 3} @54429 +4096"
    stages = Stages(console, [Stage(title, 1e6)], Pace(1.0, 10.0, 1.0), hands.clock())
    stages.announce(128)
    with stages.stage(title, 1000, "prompt 100 of 128, layer set " + "x" * 50):
        hands.pass_by(60.0)
        stages.tell("prompt 100 of 128, layer set " + "x" * 50)
    assert len(lines(console)) == 4
    assert max(map(len, lines(console))) <= 80
    assert lines(console)[2].startswith("1 of 1: held-out text: ") and "@54429 +4096; about" in lines(console)[2]


def test_a_long_text_loses_its_middle() -> None:
    assert shortened("0123456789", 10) == "0123456789"
    assert shortened("0123456789", 7) == "012…789"
    assert [len(shortened("0123456789", columns)) for columns in range(1, 12)] == [*range(1, 11), 10]


def test_a_busy_machine_is_told_once_with_the_estimate_for_a_quiet_one() -> None:
    console, hands = log(), Hands()
    stages = made(console, hands, "ab", 4.0, 1.0)
    stages.announce(2)
    with stages.stage("a", 2) as advance:
        for _ in range(2):
            hands.pass_by(15.0, 3.0)
            advance(50)
    told = [line for line in lines(console) if "busy" in line]
    assert told == ["the cores are busy, 25% is left for this; about 3 min on a quiet machine"]
    assert lines(console)[:2] == ["about 13 min on 2 threads, in 2 stages", *told]


def test_a_machine_that_becomes_busy_is_told_when_ten_seconds_show_it() -> None:
    console, hands = log(), Hands()
    stages = made(console, hands, "ab")
    with stages.stage("a", 3) as advance:
        hands.pass_by(9.0, 3.0)
        advance(10)
        assert "busy" not in lines(console)[-1]
        hands.pass_by(9.0, 3.0)
        advance(10)
    quiet = (2.0 * 20 + 6) / (20 + 20) * 180
    assert lines(console)[1] == f"the cores are busy, 33% is left for this; about {duration(quiet)} on a quiet machine"


def test_a_quiet_machine_is_not_called_busy() -> None:
    console, hands = log(), Hands()
    stages = made(console, hands, "a", 1.0, 0.8)
    stages.announce(2)
    with stages.stage("a", 2) as advance:
        hands.pass_by(50.0, 40.0)
        advance(50)
    assert not any("busy" in line for line in lines(console))


def test_the_estimate_is_that_of_the_fastest_of_four_passes() -> None:
    wall, cpu = iter([0, 9, 10, 12, 20, 25, 30, 37]), iter([0, 2, 2, 3, 3, 4, 4, 5])
    work = Work(wrap(build("llama")))
    pace = work.pace(Clock(lambda: float(next(wall)), lambda: float(next(cpu))))
    assert pace == Pace(work.forward(256), 2.0, 1.0)


def test_the_work_of_a_set_of_layers_is_that_of_the_layers_that_are_computed() -> None:
    work = Work(wrap(build("llama")))
    probe = Probe("text", tuple(range(100)), 60, (70,))
    assert [work.share(layers) for layers in [(0, 2), (1,), {2: 64}, ()]] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert work.sparse(probe, 0.5) == work.sparse(probe, 1) / 2 > 0
    assert work.forward(200) > 2 * work.forward(100), "attention grows with the square"
    assert work.pace(Clock()).wall > 0
