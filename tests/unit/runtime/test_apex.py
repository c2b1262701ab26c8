"""APEX: requests on the device or on the CPU, rows that wait from one step to the next. A model with weights answers,
so that every token tells whether any row was disturbed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hybrid_backend.errors import ConfigError
from hybrid_backend.methods import resolve_method
from hybrid_backend.methods.apex.questions import PoolQuestions
from tests.support.harness import PAGE, config
from tests.support.held_answers import Held, settled
from tests.support.tiny_engine import TinyEngine, TinyModel, random_prompt

LAYERS = 4
MODEL = TinyModel(LAYERS)
STRATEGIES = pytest.mark.parametrize("strategy", ["gpu", "lockstep", "overlap", "auto"])


def engine(strategy: str = "overlap", pages: int = 8, **keys: Any) -> TinyEngine:
    apex = {"strategy": strategy, "device_tokens": pages * PAGE, **keys.pop("apex", {})}
    parks = keys.pop("parks", True)
    return TinyEngine(config(method="apex", apex=apex, **keys), MODEL, parks=parks)


def add(running: TinyEngine, **lengths: int) -> None:
    """Add requests with prompts of these lengths."""
    for name, length in lengths.items():
        running.add(name, random_prompt(length))


def questions_of(running: TinyEngine) -> PoolQuestions:
    assert running.executor.waiting is not None
    assert isinstance(running.executor.waiting.questions, PoolQuestions)
    return running.executor.waiting.questions


# --- answers ---


@STRATEGIES
def test_every_request_gets_the_model_s_tokens_wherever_it_is(strategy: str) -> None:
    """More than the device holds, so that some are on the CPU; they grow, so that some are evicted and come back."""
    running = engine(strategy)
    for i, length in enumerate((40, 70, 33, 5, 90)):
        running.add(f"r{i}", random_prompt(length))
        running.step()
    running.advance(70)
    running.check_answers()
    gauges, stats = running.runtime.gauges(), running.runtime.stats
    assert gauges["hybrid_moved_requests"] > 0
    assert gauges["hybrid_resident_requests"] > 0
    assert (stats.cpu_ratio() > 0) == (strategy != "gpu")
    assert {done for done, _ in stats.steps} <= (
        {"gpu", strategy} if strategy != "auto" else {"overlap", "lockstep", "gpu"}
    )


def test_a_request_on_the_cpu_yields_a_token_in_as_many_steps_as_layers_and_one() -> None:
    running = engine(pages=1)
    add(running, a=20)
    with settled(questions_of(running)):
        while len(running.requests["a"].answer) < 5:
            running.step()
    assert running.steps == 1 + 4 * (LAYERS + 1)
    assert running.executor.waiting.late_rows == 0  # type: ignore[union-attr]
    running.check_answers()


def test_requests_on_the_device_are_not_delayed_by_those_on_the_cpu() -> None:
    running = engine(pages=4)
    add(running, here=20, there=90)
    running.advance(25)
    assert len(running.requests["here"].answer) == 25
    running.check_answers()


def test_a_late_answer_delays_its_own_row_only_and_changes_no_token() -> None:
    running = engine(pages=1)
    add(running, a=20, b=21)
    running.step()
    held = Held(questions_of(running))
    with_a = running.runtime.tiers.frames
    running.step()
    held.holds = {with_a.index("a")}  # type: ignore[arg-type]
    with settled(questions_of(running), held):
        running.advance(3 * (LAYERS + 1))
        assert len(running.requests["a"].answer) == 1 and len(running.requests["b"].answer) == 4
        assert running.executor.waiting.late_rows >= 2 * LAYERS  # type: ignore[union-attr]
        held.holds = set()
        running.advance(LAYERS + 1)
    assert len(running.requests["a"].answer) == 2
    running.check_answers()


# --- lives ---


@pytest.mark.parametrize("phase", range(LAYERS + 2))
def test_an_abort_or_preemption_in_any_phase_leaves_nothing_and_disturbs_nobody(phase: int) -> None:
    running = engine(pages=1)
    add(running, a=40, b=21, c=35)
    running.step()
    running.advance(phase)
    running.drop("a")
    running.preempt("b")
    parking = running.executor.waiting
    assert parking is not None
    assert parking.parked_rows <= 1
    running.add("d", random_prompt(50))  # gets the pages and the index of the first
    running.advance(4 * (LAYERS + 1))
    assert all(len(request.answer) > 1 for request in running.requests.values())
    running.check_answers()
    for name in list(running.requests):
        running.drop(name)
    assert parking.parked_rows == 0 and questions_of(running)._tickets == {}
    assert running.runtime.gauges()["hybrid_resident_requests"] == running.runtime.method._residency.placement.used == 0  # type: ignore[union-attr]


def test_a_parked_row_goes_on_inside_the_layers_when_the_strategy_changes() -> None:
    running = engine("auto", pages=3, apex={"min_cpu_per_gpu": 1, "hardware": "t4"})
    verdicts = iter(["overlap", "overlap", "lockstep", "overlap", "lockstep"] * 20)
    running.method._strategy = lambda rows, on_cpu: next(verdicts) if bool(on_cpu.any()) else "gpu"  # type: ignore[method-assign]
    add(running, a=60, b=20)
    running.advance(30)
    assert len(running.requests["a"].answer) > 10
    running.check_answers()


def test_rows_are_scheduled_when_the_engine_likes() -> None:
    """A parked row that is left out of some steps goes on where it was."""
    running = engine(pages=1)
    add(running, a=20, b=33)
    running.step()
    for turn in range(40):
        running.step(["a"] if turn % 3 else ["b", "a"] if turn % 2 else ["b"])
    assert all(len(request.answer) > 1 for request in running.requests.values())
    running.check_answers()


# --- what goes wrong ---


def test_a_question_that_fails_takes_its_own_request_back_and_nobody_else_s() -> None:
    running = engine(pages=1)
    add(running, a=20, b=21)
    running.step()
    held = Held(questions_of(running))
    held.broken = {running.runtime.tiers.frames.index("a") or 0}
    running.advance(3)
    assert running.failed[:1] == ["a"] and "b" not in running.failed
    held.broken = set()
    running.advance(3 * (LAYERS + 1))
    running.check_answers()


def test_a_parked_row_waits_no_longer_than_the_deadline() -> None:
    running = engine(pages=1, workers={"threads": 1, "deadline_seconds": 0.2})
    add(running, a=20, b=21)
    running.step()
    held, frames = Held(questions_of(running)), running.runtime.tiers.frames
    running.step()
    held.holds = {frames.index("a") or 0}
    started = threading.Event()
    while not running.failed and not started.wait(0.02):
        running.step()
    assert running.failed == ["a"]
    held.holds = set()
    running.advance(3 * (LAYERS + 1))
    running.check_answers()


def test_a_worker_that_fails_while_the_layer_waits_fails_the_step() -> None:
    running = engine("lockstep", pages=1)
    add(running, a=20)
    running.step()
    held = Held(questions_of(running))
    held.broken = {0, 1, 2, 3, 4, 5, 6, 7}
    assert running.step() == [] and running.failed == ["a"]
    held.broken = set()
    running.advance(2)
    running.check_answers()


# --- what is decided ---


def test_without_an_engine_that_lets_rows_wait_auto_goes_in_lockstep() -> None:
    running = engine("auto", pages=1, parks=False)
    add(running, a=40)
    running.advance(4)
    assert {done for done, _ in running.runtime.stats.steps} == {"lockstep"}
    assert len(running.requests["a"].answer) == 4
    running.check_answers()


def test_the_rule_s_ratio_and_bound_are_reported() -> None:
    running = engine("auto", pages=4, apex={"hardware": "h100"})
    add(running, a=40, b=40)
    running.advance(2)
    gauges = running.runtime.gauges()
    assert gauges["hybrid_speed_ratio"] == pytest.approx(
        running.method._times.device_rate(1) / running.method._times.cpu_rate
    )
    assert gauges["hybrid_speed_bound"] > 3
    ((done, wanted),) = running.runtime.stats.steps
    assert wanted == ("pipeline" if gauges["hybrid_speed_ratio"] < gauges["hybrid_speed_bound"] else "overlap")
    assert done in ("lockstep", "overlap")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"device_tokens": 16, "strategy": "auto"}, "apex.device_tokens: 16 is less than one page of page_size 32"),
        ({"hardware": "abacus"}, "apex.hardware 'abacus': no such machine; write one of"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(keys: dict[str, object], message: str) -> None:
    cfg = config(method="apex", page_size=32, budget_tokens=128, apex=keys)
    with pytest.raises(ConfigError, match=message):
        resolve_method("apex").check(cfg, torch.device("cpu"), 4, 2)
