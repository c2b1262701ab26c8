"""Copies beside the step, on a device whose streams go on in any order that events allow (tests/support/streams.py)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.step import StepDriver, Toolbox
from tests.slow.test_far_device import FRAMES
from tests.slow.test_graph_step import ROWS, replay_as_a_graph
from tests.support.far_device import capture, late
from tests.support.gpu import ON_GPU
from tests.support.harness import INT8_ERROR, PAGE, Engine, config, spec
from tests.support.streams import STREAMS, Event, Graph, Order, Stream, current_stream, graph

LAYERS, STEPS, FEW = 3, 100, 30
of_the_simulation = pytest.mark.skipif(ON_GPU, reason="a GPU's streams go on as they like")


def check_steps(
    device: torch.device, method: str, steps: int, order: Order | None = None, digest: str = "minmax",
    interval: int = 1, kv_dtype: str = "auto",
) -> None:  # fmt: skip
    """Requests that come, grow out of their frames and go, decoded beside the same on a CPU: by native kernels, or by
    the oracle's where pages have codes, whose sums the native kernels round."""
    kernels = "torch" if digest == "codes" or kv_dtype == "int8" else "native"
    keys = {
        "method": method, "frames_per_request": FRAMES - 1, "exact_layers": [0], "whole_layers": [0],
        "budget_factors": [1, 0.75, 1.25],
        "recall": {"intervals": 2}, "metrics": {"sample_interval": 1},
        "selection": {"digest": digest, "interval": interval}, "kv_dtype": kv_dtype,
    }  # fmt: skip
    shape, tolerance = spec(LAYERS), 1e-4
    if kv_dtype == "int8":
        shape, tolerance = replace(shape, kv_dtype=torch.int8), INT8_ERROR
    far = Engine(config(**keys), shape, num_pages=64, max_requests=ROWS, device=device)
    near = Engine(config(**keys, device_kernels=kernels), shape, num_pages=64, max_requests=ROWS)
    replay_as_a_graph(far, capture)
    chance, born = random.Random(5), 0
    with late():
        for step in range(steps):
            STREAMS.seed(step, order)
            for name in [name for name in far.sequences if chance.random() < 0.1]:
                for each in (far, near):
                    each.drop(name)
            if len(far.sequences) < ROWS and (not far.sequences or chance.random() < 0.5):
                prompt, born = chance.randint(PAGE, 9 * PAGE), born + 1
                for each in (far, near):
                    each.add(f"{born}", prompt)
                    each.prefill(f"{born}")
            work = dict.fromkeys(far.sequences, 1)
            found, expected = (each.step(work, lookahead_noise=0.3, tolerance=None) for each in (far, near))
            for name in work:
                assert (found[name] - expected[name]).abs().max() < tolerance, f"request {name} in step {step}"
    assert sum(layer.recalled_pages for layer in far.runtime.stats.layers) > steps // 2, "too little is copied"


@pytest.mark.parametrize("method", ["scout", "infinigen"])
def test_two_hundred_steps_are_right_in_whatever_order_the_streams_go_on(device: torch.device, method: str) -> None:
    """A hundred of each method."""
    check_steps(device, method, STEPS)


@pytest.mark.parametrize("method", ["scout", "infinigen"])
def test_selections_that_last_are_split_right_in_whatever_order_the_streams_go_on(
    device: torch.device, method: str
) -> None:
    check_steps(device, method, STEPS // 2, interval=3)


def test_pages_chosen_by_codes_are_the_same_ones(device: torch.device) -> None:
    """Built of a prompt's keys while they cross to the host pool, and when a page that grows is full."""
    check_steps(device, "scout", FEW, digest="codes")


@pytest.mark.parametrize("method", ["scout", "infinigen"])
@pytest.mark.parametrize("digest", ["minmax", "minmax_int8"])
def test_steps_over_pages_in_8_bits_are_right_in_any_order(device: torch.device, method: str, digest: str) -> None:
    """Digests of a prompt are of the rounded keys, which nobody reads back from the host pool."""
    check_steps(device, method, FEW, digest=digest, kv_dtype="int8")


@of_the_simulation
def test_a_copy_that_nobody_waits_for_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toolbox, "join", lambda self: None)
    with pytest.raises(AssertionError, match="request"):
        check_steps(device, "scout", STEPS, "default first")
    STREAMS.finish()


@of_the_simulation
def test_a_selection_that_nobody_waits_for_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepDriver, "_await_lookahead", lambda self, layer: self._lookaheads.pop(layer, None))
    with pytest.raises(AssertionError, match=r"request"):
        check_steps(device, "scout", FEW, "default first")
    STREAMS.finish()


# --- the simulation itself ---


@of_the_simulation
def test_a_capture_that_waits_for_what_is_outside_of_it_is_refused() -> None:
    outside, side = Event(), Stream()
    outside.record()
    with pytest.raises(AssertionError, match="capture isolation"), graph(Graph()):
        current_stream().wait_event(outside)
    with pytest.raises(AssertionError, match="capture isolation"), graph(Graph()):
        current_stream().wait_stream(side)  # which never forked


@of_the_simulation
def test_a_capture_that_ends_before_its_forks_have_joined_is_refused() -> None:
    side, made = Stream(), Graph()
    with pytest.raises(AssertionError, match="has joined"), graph(made):
        side.wait_stream(current_stream())
        with side:
            STREAMS.launch(lambda: None)


@of_the_simulation
@pytest.mark.parametrize("waits", [True, False])
def test_streams_of_a_late_device_go_on_in_random_order_but_for_what_they_wait_for(waits: bool) -> None:
    def order(seed: int) -> tuple[str, ...]:
        STREAMS.seed(seed, "random")
        side, done = Stream(), list[str]()
        with late():
            STREAMS.launch(lambda: done.append("first"))
            if waits:
                side.wait_stream(current_stream())
            with side:
                STREAMS.launch(lambda: done.append("beside"))
            STREAMS.launch(lambda: done.append("second"))
        return tuple(done)

    orders = {order(seed) for seed in range(30)}
    both = {("first", "beside", "second"), ("first", "second", "beside")}
    assert orders == (both if waits else both | {("beside", "first", "second")})
