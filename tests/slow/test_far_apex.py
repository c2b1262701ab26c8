"""APEX on a device that is not the host (far_device.py): the CPU is asked through boxes, and one graph of the whole
model serves steps of every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.batch import Step
from hybrid_backend.methods.apex.questions import BoxQuestions
from hybrid_backend.step.method import request_room
from tests.support.far_device import busy, late
from tests.support.gpu import ON_GPU
from tests.support.harness import PAGE, config
from tests.support.held_up import HeldQuestions
from tests.support.streams import STREAMS
from tests.support.tiny_engine import CapturedEngine, TinyModel, random_prompt

LAYERS, ROWS = 2, 3
MODEL = TinyModel(LAYERS)
# Two fit four pages, the third is on the CPU until one of them is gone; the second grows out.
LENGTHS = {"a": 15, "b": 30, "c": 28}


@dataclass
class FarTiny(CapturedEngine):
    """Some questions never reach the workers, or cannot be computed."""

    max_requests: int = ROWS

    def prepare(self) -> None:
        questions = self.executor.waiting.questions  # type: ignore[union-attr]
        assert isinstance(questions, BoxQuestions)
        self.held = HeldQuestions(questions)

    def index(self, name: str) -> int:
        found = self.runtime.tiers.frames.index(name)
        assert found is not None
        return found

    def close(self) -> None:
        self.held.close()
        super().close()


@contextmanager
def engine(
    device: torch.device, strategy: str, pages: int = 4, deadline: float = 20, is_late: bool = False, **more: bool
) -> Iterator[FarTiny]:
    apex = {"strategy": strategy, "device_tokens": pages * PAGE, "hardware": "h200"}
    keys = {"workers": {"threads": 1, "deadline_seconds": deadline}}
    made = FarTiny(config(method="apex", apex=apex, **keys), MODEL, device=device, **more)  # type: ignore[arg-type]
    with late() if is_late else nullcontext():
        yield made
        made.check_answers()


def begin(running: FarTiny, *names: str) -> None:
    for name in names:
        running.add(name, random_prompt(LENGTHS[name]))
    running.step()


def run(running: FarTiny, answers: int) -> None:
    """Until every request has so many tokens. An answer may be late."""
    for _ in range(100):
        if all(len(request.answer) >= answers for request in running.requests.values()):
            return
        running.step()
    raise AssertionError({name: request.answer for name, request in running.requests.items()})


@pytest.mark.parametrize(
    ("strategy", "captures", "is_late"),
    [
        ("gpu", True, True),
        ("lockstep", True, True),
        ("overlap", True, True),
        ("auto", True, True),
        ("overlap", False, False),
    ],
)
def test_every_request_gets_the_model_s_tokens(
    device: torch.device, strategy: str, captures: bool, is_late: bool
) -> None:
    """Some are on the CPU; they grow, are evicted, come back. ``auto``: one graph serves steps of all kinds."""
    with engine(device, strategy, captures=captures, is_late=is_late) as running:
        if strategy == "auto":
            turns = cycle(["overlap", "lockstep", "overlap", "overlap"])
            running.method._strategy = lambda rows, on_cpu: next(turns) if bool(on_cpu.any()) else "gpu"  # type: ignore[method-assign]
        begin(running, "a")
        begin(running, "b")
        begin(running, "c")
        running.advance(4)
        running.drop("a")
        running.advance(5)
        gauges, stats = running.runtime.gauges(), running.runtime.stats
        assert gauges["hybrid_moved_requests"] > 1 and gauges["hybrid_copied_bytes"] > 0
        assert (stats.cpu_ratio() > 0) == (strategy != "gpu")
        done = {name for name, _ in stats.steps}
        assert done == ({"gpu", "lockstep", "overlap"} if strategy == "auto" else {"gpu", strategy})
        run(running, 3)
        for name in ("b", "c"):
            running.drop(name)
        left = running.runtime.gauges()
        assert left["hybrid_frames_in_use"] == left["hybrid_resident_requests"] == left["hybrid_parked_rows"] == 0


@pytest.mark.parametrize("strategy", ["gpu", "lockstep", "overlap"])
def test_requests_that_would_delay_those_on_the_device_may_not_start(device: torch.device, strategy: str) -> None:
    """The device holds four pages; with overlap the CPU has a whole step for answers, in lockstep no time."""
    with engine(device, strategy) as running:
        assert request_room(running.method) is None, "nothing decodes"
        begin(running, "a", "b")
        running.step()
        room = request_room(running.method)
        if strategy == "gpu":
            assert room is None, "no worker is asked"
            return
        assert room is not None and room.device_tokens == 4 * PAGE
        assert (room.cpu_tokens > 0) == (strategy == "overlap")
        assert room.startable([LENGTHS["a"], LENGTHS["b"]], [LENGTHS["c"]]) == (room.cpu_tokens >= LENGTHS["c"])


def test_a_step_in_lockstep_never_waits_for_the_device(device: torch.device) -> None:
    """Nor does the host when it opens it, with a request that begins, one that moves and one that is gone."""
    with engine(device, "lockstep", is_late=True) as running:
        begin(running, "a", "b", "c")
        opened, closed = running.runtime.begin_step, running.runtime.end_step
        launched: list[int] = []

        def begin_step(batch: Any) -> Step:
            with busy():
                return opened(batch)

        def end_step(step: Step) -> None:
            with busy():
                closed(step)
                assert running.runtime.unfinished(step) == []
            launched.append(1 if ON_GPU else STREAMS.waiting)

        running.runtime.begin_step = begin_step  # type: ignore[method-assign]
        running.runtime.end_step = end_step  # type: ignore[method-assign]
        running.advance(4)
        with busy():
            running.drop("a")
        running.advance(2)
        assert running.runtime.gauges()["hybrid_moved_requests"] > 0
        assert len(launched) == 6 and min(launched) > 0, "somebody waited"


# --- what goes wrong ---


@pytest.mark.parametrize("strategy", ["lockstep", "overlap"])
@pytest.mark.parametrize("answer", ["cannot be computed", "is later than the deadline"])
def test_a_request_without_an_answer_is_taken_back_and_nobody_else(
    device: torch.device, strategy: str, answer: str
) -> None:
    is_late = answer == "is later than the deadline"
    with engine(device, strategy, pages=1, deadline=2 if is_late else 20) as running:
        begin(running, "b", "c")
        running.step()
        without_answer = running.held.holds if is_late else running.held.spoils
        without_answer.add(running.index("b"))
        for _ in range(100 if is_late else LAYERS + 2):
            running.step()
            if running.failed:
                break
        without_answer.clear()
        assert running.failed == ["b"]
        run(running, 4)
        assert running.failed == ["b"]


def test_a_request_that_is_gone_when_its_failure_is_known_is_named_and_its_successor_is_not(
    device: torch.device,
) -> None:
    """The host is a step ahead of the device, as with asynchronous scheduling: what a request wrote that was preempted
    meanwhile must still leave the prefix cache."""
    with engine(device, "lockstep", pages=1, is_late=True, parks=False) as running:
        begin(running, "b", "c")
        running.step()
        page, index = running.requests["b"].pages[-1], running.index("b")
        running.held.spoils.add(running.index("b"))
        step, _ = running._begin(["c", "b"])
        running.forward(step, torch.zeros(2, dtype=torch.int64, device=device))
        running.runtime.end_step(step)
        running.preempt("b")
        running.preempt("c")  # its token was a made up one
        torch.cuda.current_stream().synchronize()
        running.held.spoils.clear()
        running.step()
        running.step()
        assert running.index("c") == index
        failure = running.runtime.failure(step)
        assert failure is not None and failure.request_ids == ["b"] and failure.pages == [page]
        assert running.failed == [] and len(running.requests["b"].answer) == 4


@pytest.mark.parametrize("phase", range(LAYERS + 1))
def test_an_abort_or_preemption_in_any_phase_disturbs_nobody(device: torch.device, phase: int) -> None:
    with engine(device, "overlap", pages=1, is_late=True) as running:
        begin(running, "a", "b", "c")
        running.advance(phase)
        running.drop("b")
        running.preempt("c")
        running.add("d", random_prompt(29))  # gets the pages and the index of the first
        run(running, 2)
        assert running.failed == []
