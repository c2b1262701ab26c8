"""Samples that a device hands over (`step.samples`): its kernels run under Triton's interpreter, or on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.attention.quality import kept_mass
from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.methods import resolve_method
from hybrid_backend.step import samples
from hybrid_backend.step.samples import BoxSamples, HostSamples
from tests.slow.test_graph_step import ROWS, replay_as_a_graph
from tests.support.harness import PAGE, Engine, config, decode_step, spec

LAYERS, EXACT = 2, 0
KEYS: dict[str, Any] = {
    "frames_per_request": 6, "exact_layers": [EXACT], "whole_layers": [],
    "selection": {"digest": "minmax"}, "metrics": {"sample_interval": 1},
}  # fmt: skip


def made(kernels: str, captured: bool = False, **keys: object) -> Engine:
    engine = Engine(config(**KEYS | {"device_kernels": kernels} | keys), spec(LAYERS), 64, max_requests=ROWS)
    if captured:
        replay_as_a_graph(engine)
    return engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One request that leaves pages out has decoded a token, of which nothing is counted yet."""
    found = made("triton")
    begin(found)
    found.step({"a": 1}, lookahead_noise=0.3, tolerance=None)
    yield found


def begin(engine: Engine) -> None:
    engine.admit("a", 8 * PAGE)


def counted(engine: Engine) -> tuple[int, int]:
    """Samples of mass and of cosine, when all that the device has handed over is counted."""
    decode_step(engine).samples.finish()
    layer = engine.runtime.stats.layers[1]
    return layer.mass_samples, layer.cosine_samples


@pytest.mark.parametrize(
    ("keys", "captured"),
    [
        ({}, False),
        ({"selection": {"digest": "minmax", "granularity": "kv_head"}}, True),
        ({"method": "infinigen"}, True),
        ({"lookahead": {"enabled": False}}, True),
    ],
    ids=["launched", "per-head", "infinigen", "true query"],
)
def test_what_is_sampled_is_what_the_host_samples(keys: dict[str, object], captured: bool) -> None:
    """Of a row that leaves pages out beside one that does not, and then of two in turn; the device's rows are padded
    where its step is a graph's."""
    engines = made("native", **keys), made("triton", captured, **keys)
    for each in engines:
        begin(each)
        each.admit("b", 6 * PAGE - 1)
        for names in ("ba", "ab", "ba"):
            each.step(dict.fromkeys(names, 1), lookahead_noise=0.3, tolerance=None)
        decode_step(each).samples.finish()
    assert isinstance(decode_step(engines[0]).samples, HostSamples)
    assert isinstance(decode_step(engines[1]).samples, BoxSamples)
    here, there = (each.runtime.stats.layers for each in engines)
    looks_ahead = "lookahead" not in keys
    assert (here[1].mass_samples, here[1].cosine_samples) == (3, 3 * looks_ahead)
    assert 0 < here[1].mass_sum < 3
    for mine, layer in zip(here, there, strict=True):
        assert (mine.mass_samples, mine.cosine_samples) == (layer.mass_samples, layer.cosine_samples)
        assert mine.mass_sum == pytest.approx(layer.mass_sum, abs=1e-4)
        assert mine.cosine_sum == pytest.approx(layer.cosine_sum, abs=1e-4)


def test_rows_that_fit_have_cosines_and_no_mass() -> None:
    found = made("triton")
    found.admit("a", 2 * PAGE)
    found.step({"a": 1}, lookahead_noise=0.3, tolerance=None)
    assert counted(found) == (0, 1)


def test_most_layers_and_steps_are_not_sampled() -> None:
    found = made("triton", metrics={"sample_interval": 4})
    begin(found)
    step = decode_step(found)
    wanted = []
    for _ in range(5):
        found.step({"a": 1}, lookahead_noise=0.3, tolerance=None)
        wanted.append(step.buffers.inputs.sampled.tolist())
    assert wanted == [[0, int((found.ran.number - 4 + i + 1) % 4 == 0)] for i in range(5)]
    assert counted(found) == (sum(row[1] for row in wanted),) * 2


def test_where_nothing_is_sampled_nothing_is_launched_and_no_box_is_made() -> None:
    found = made("triton", metrics={"sample_interval": 0})
    assert isinstance(decode_step(found).samples, HostSamples)


@pytest.mark.parametrize("returns", ["gone", "preempted"])
def test_a_sample_of_a_request_that_was_released_before_it_came_does_not_count(engine: Engine, returns: str) -> None:
    """Its pages may be others' by now. The cosine reads none."""
    if returns == "gone":
        engine.drop("a")
    else:
        index = engine.runtime.tiers.frames.index("a")
        engine.preempt("a")
        engine.prefill("a")
        engine.step({"a": 1}, lookahead_noise=0.3, tolerance=None)  # in the same place
        assert engine.runtime.tiers.frames.index("a") == index
    again = returns == "preempted"
    assert counted(engine) == (again, 1 + again)


def test_a_sample_of_a_request_that_is_released_while_it_is_measured_does_not_count(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures, goes_on, done = threading.Event(), threading.Event(), list[float]()

    def slow(*args: Any) -> float:
        measures.set()
        assert goes_on.wait(20)
        done.append(kept_mass(*args))
        return done[0]

    monkeypatch.setattr(samples, "kept_mass", slow)
    decode_step(engine).samples.count()
    assert measures.wait(20)
    engine.drop("a")
    goes_on.set()
    assert counted(engine) == (0, 1) and len(done) == 1


def test_a_sample_of_a_step_that_failed_does_not_count(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    held = decode_step(engine).samples
    assert isinstance(held, BoxSamples)
    failed = engine.ran.number + 1
    monkeypatch.setattr(held, "_failure", lambda number: WorkerError("late") if number == failed else None)
    assert counted(engine) == (0, 0)
    engine.step({"a": 1}, lookahead_noise=0.3, tolerance=None)
    monkeypatch.undo()
    assert counted(engine) == (1, 1)


def test_a_sample_that_never_comes_is_waited_for_no_longer_than_a_device_may_be_behind(engine: Engine) -> None:
    """A step that was opened and did not run. Until then the layer's box is its own."""
    assert counted(engine) == (1, 1)
    engine.begin_and_die("a", is_told=True)
    engine.step({"a": 1}, lookahead_noise=0.3, tolerance=None)
    assert counted(engine) == (1, 1)
    for _ in range(STEPS - 1):
        engine.begin_and_die("a", is_told=True)
    engine.step({"a": 1}, lookahead_noise=0.3, tolerance=None)
    assert counted(engine) == (2, 2)


def test_an_idle_device_hands_nothing_over(engine: Engine) -> None:
    """A graph that is replayed for nobody after a step that was sampled."""
    assert counted(engine) == (1, 1)
    step = decode_step(engine)
    assert step.buffers.inputs.sampled.tolist() == [0, 1]
    engine.runtime.idle()
    assert step.buffers.inputs.sampled.tolist() == [0, 0] and int(step.buffers.inputs.number) == engine.ran.number + 1


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_a_promise_is_kept_by_a_budget_that_grows_and_then_by_everything(captured: bool) -> None:
    """Random keys, whose mass is flat: neither 4 nor 7 of 14 pages hold 0.9 of it. Where all is attended every output
    is dense attention's."""
    promise = {"quality": {"min_mass": 0.9}, "sparse": "always", "exact_layers": [], "frames_per_request": 7}
    found = made("triton", captured, **promise)
    found.admit("a", 13 * PAGE + 2)
    seen: list[float] = []
    while not seen or seen[-1] != float("inf"):
        found.step({"a": 1}, tolerance=None)
        decode_step(found).samples.finish()
        seen.append(found.runtime.gauges()["hybrid_quality_budget_tokens"])
        assert len(seen) < 8
    assert seen[0] == 4 * PAGE and set(seen[1:-1]) == {7 * PAGE}
    attended = [layer.selected_tokens for layer in found.runtime.stats.layers]
    found.decode("a", steps=2)
    tokens = found.sequences["a"].tokens
    after = [layer.selected_tokens for layer in found.runtime.stats.layers]
    assert [new - old for old, new in zip(attended, after, strict=True)] == [tokens + tokens - 1] * LAYERS
    assert found.runtime.gauges()["hybrid_quality_mass"] < 0.9


def test_samples_of_an_earlier_budget_do_not_judge_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are under way when it changes."""
    found = made("triton", quality={"min_mass": 0.9}, sparse="always")
    goes_on = threading.Event()
    monkeypatch.setattr(samples, "kept_mass", lambda *_: float(goes_on.wait(20)))
    try:
        begin(found)
        found.step({"a": 1}, tolerance=None)
        step, stats = decode_step(found), found.runtime.stats.layers[1]
        step.samples.count()  # one is being measured
        stats.mass_sum, stats.mass_samples = 0.5, 1
        found.step({"a": 1}, tolerance=None)
        assert found.runtime.gauges()["hybrid_quality_budget_tokens"] > 4 * PAGE
        goes_on.set()
        assert counted(found)[0] == 2, "that of the second step, and the one that was made up"
    finally:
        goes_on.set()


def test_a_gpu_serves_a_promise() -> None:
    promise = config(quality={"min_mass": 0.9})
    resolve_method("scout").check(promise, torch.device("cuda"), 3, 2)


@pytest.mark.parametrize("lists", [1, 2])
def test_native_kernels_measure_what_torch_does(lists: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(lists)
    kv, q = torch.randn(9, 2, 2, PAGE, 16, generator=rng), torch.randn(4, 16, generator=rng)
    table = torch.randperm(9, generator=rng)[:6]
    selected = torch.tensor([[0, 2, 5], [1, 3, 5]])[:lists]

    def mass() -> Tensor:
        return torch.tensor(kept_mass(q, kv, table, 5 * PAGE + 3, selected, 0.25))

    native = mass()
    monkeypatch.setattr("hybrid_backend.kernels.cpu.decodes", lambda *_: False)
    torch.testing.assert_close(native, mass(), atol=1e-5, rtol=0)
