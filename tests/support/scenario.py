"""A scenario that every method must serve: chunked prompts, a shared prefix, growth, pressure, preemption and abort.

`LIFE` is data; `play` runs it on engines of `tests.support.harness`, which compare every output with attention in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_backend.step.driver import StepDriver
from hybrid_backend.step.method import FixedFrames
from tests.support.harness import PAGE, Engine


@dataclass(frozen=True)
class Request:
    """A request that arrives. It begins with the whole pages of the request ``shared_with``."""

    prompt: int
    shared_with: str | None = None


@dataclass(frozen=True)
class Event:
    """Changes among the requests, and the ``steps`` that follow them.

    Attributes:
        work: query tokens of each request in one step, in the order of the batch's rows.
    """

    work: Mapping[str, int] = field(default_factory=dict)
    steps: int = 1
    arrivals: Mapping[str, Request] = field(default_factory=dict)
    preempted: Sequence[str] = ()
    aborted: Sequence[str] = ()


FIRST = 3 * PAGE + 10
"""Tokens of the first prompt. They end within a page, and fit the frames of every test."""
LONG = 9 * PAGE + 10
"""Tokens of the prompt that outgrows budgets and frames."""
LIFE: tuple[Event, ...] = (
    Event({"a": 20}, 2, arrivals={"a": Request(FIRST)}),
    Event({"a": FIRST - 40}),
    Event({"a": 1}),
    Event({"a": 1, "b": 6}, arrivals={"b": Request(3 * PAGE + 6, shared_with="a")}),
    Event({"b": 1, "a": 1}, 5),  # a fills its page
    Event({"c": 4 * PAGE + 3, "a": 1, "b": 1}, arrivals={"c": Request(LONG)}),
    Event({"a": 1, "c": LONG - 4 * PAGE - 3}),
    Event({"c": 1, "a": 1, "b": 1}, 3),
    Event({"c": 1, "a": FIRST + 12}, preempted=["a"]),
    Event({"d": PAGE + 4, "c": 1}, aborted=["b"], arrivals={"d": Request(PAGE + 4)}),  # d gets what b had
    Event({"a": 1, "c": 1, "d": 1}, 3),  # c begins a page
)

SHORT_LIFE: tuple[Event, ...] = (
    Event({"c": 4 * PAGE + 3}, arrivals={"c": Request(LONG)}),
    Event({"c": LONG - 4 * PAGE - 3}),
    Event({"c": 1, "a": PAGE + 4}, arrivals={"a": Request(PAGE + 4)}),
    Event({"a": 1, "c": 1}, 3),
)
"""Pressure alone, for kernels that are slow because they are interpreted."""

GROWTH: tuple[Event, ...] = (
    Event({"a": 6 * PAGE - 1}, arrivals={"a": Request(6 * PAGE - 1)}),
    Event({"b": 3 * PAGE}, arrivals={"b": Request(3 * PAGE)}),
    Event({"a": 1, "b": 1}, 3),
    Event({"c": 9 * PAGE - 1}, aborted=["b"], arrivals={"c": Request(9 * PAGE - 1)}),
    Event({"c": 1, "a": 1}, 7),
)
"""Two requests of unlike length grow out of their frames, one is aborted and another admitted."""


def play(
    engines: Sequence[Engine],
    life: Sequence[Event] = LIFE,
    tolerance: float = 1e-4,
    after_step: Callable[[], object] = lambda: None,
    near: float | None = None,
) -> None:
    """Run ``life`` on the engines side by side, and end all requests. Every engine must release all that it had.

    Outputs are dense attention's, to ``tolerance``, where a method promises that. An engine that is witnessed compares
    all others with attention over what its method says that it attended. With ``near``, all engines' outputs must be
    as near to the first one's.
    """
    for event in life:
        for engine in engines:
            for name in event.aborted:
                engine.drop(name)
            for name in event.preempted:
                engine.preempt(name)
            for name, request in event.arrivals.items():
                engine.add(name, request.prompt, request.shared_with)
        for _ in range(event.steps):
            outs = [step(engine, event.work, tolerance) for engine in engines]
            for name in event.work if near is not None else ():
                assert all((out[name] - outs[0][name]).abs().max() < near for out in outs), f"request {name} differs"
            after_step()
    for engine in engines:
        for name in list(engine.sequences):
            engine.drop(name)
        check_nothing_is_left(engine)


def step(engine: Engine, work: Mapping[str, int], tolerance: float = 1e-4) -> dict[str, Tensor]:
    """Run one step, with predictions that are off; check outputs where the configuration promises dense attention."""
    return engine.step(dict(work), 0.3, tolerance if is_dense(engine, work) else None)


def is_dense(engine: Engine, work: Mapping[str, int]) -> bool:
    """Tell whether the configuration promises dense attention for the decode rows of a step."""
    config = engine.cfg
    if config.sparse == "never" or config.method in ("dense", "apex"):
        return True
    sequences = [engine.sequences[name] for name in work]
    if config.method == "headinfer":
        return max(s.tokens + 1 for s in sequences) <= engine.runtime.method.exact_tokens(config)
    longest = max([-(-(s.tokens + 1) // config.page_size) for s in sequences if s.tokens >= s.prompt], default=0)
    frames = engine.runtime.tiers.frames.size
    return longest <= (config.budget_pages if config.sparse == "always" or not frames else frames)


def check_nothing_is_left(engine: Engine) -> None:
    """Check that no frame, no residency map and no gauge knows of a request after all requests have ended."""
    runtime = engine.runtime
    gauges = runtime.gauges()
    assert runtime.tiers.frames.running == runtime.tiers.prompt_frames.running == 0
    assert gauges["hybrid_frames_in_use"] == gauges["hybrid_resident_requests"] == 0
    if isinstance(runtime.executor, StepDriver) and not isinstance(runtime.method, FixedFrames):  # whose map is fixed
        maps = runtime.executor.buffers.maps
        assert bool((maps.page_of.cpu() == -1).all()) and bool((maps.frame_of.cpu() == -1).all())


def check_digests(engine: Engine) -> None:
    """Check that the digests of all full pages are those that are computed anew from the pages' keys."""
    digests = engine.runtime.tiers.digests
    assert digests is not None and digests.layers
    for sequence in engine.sequences.values():
        full = torch.tensor(sequence.pages[: sequence.tokens // engine.cfg.page_size], dtype=torch.int64)
        for layer, rows in digests.layers.items():
            before = rows[full].clone()
            digests.rebuild(layer, full)
            assert torch.equal(rows[full], before), f"{sequence.name}: layer {layer}"
