"""One step, whoever runs its operations: plain torch, native C++, and Triton as a CUDA graph would replay it (fixed
buffers, padded batch, launches only).

Where no GPU is, its kernels run under Triton's interpreter; the CPU workers are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.batch import Step, captured_step
from hybrid_backend.errors import ConfigError, DeadlineError
from hybrid_backend.step.cpu_attention import MailboxCpuAttention
from tests.support.harness import PAGE, Engine, config, decode_step, spec
from tests.support.held_up import HeldUp
from tests.support.scenario import GROWTH, play

FRAMES, ROWS, INTERVAL, LAYERS = 6, 3, 2, 2
EXACT = 0  # the exact layer


def engine(kernels: str, deadline: float = 20, layers: int = LAYERS, replayed: bool = True, **keys: object) -> Engine:
    """Both kinds draw the same random numbers: they look ahead in the same steps, the sampled ones."""
    base: dict[str, object] = {
        "frames_per_request": FRAMES, "exact_layers": [EXACT], "device_kernels": kernels,
        "whole_layers": [],
        "recall": {"intervals": INTERVAL}, "metrics": {"sample_interval": 1},
        "workers": {"threads": 2, "deadline_seconds": deadline},
    }  # fmt: skip
    settings = config(**base | keys)
    made = Engine(settings, spec(layers), num_pages=64, max_requests=ROWS)
    if kernels == "triton" and replayed:
        replay_as_a_graph(made)
    return made


def replay_as_a_graph(made: Engine, capture: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Decoding layers run as captured: with as many rows as there can be, whatever the batch is."""
    runtime, captured = made.runtime, captured_step(ROWS)
    forward, lookahead = runtime.forward, runtime.lookahead

    def padded(x: Tensor) -> Tensor:
        full = x.new_zeros(ROWS, *x.shape[1:])
        full[: len(x)] = x
        return full

    def replayed(layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if step.prefill:
            return forward(layer, step, q, k, v, out)
        inputs = [padded(x) for x in (q, k, v)]
        result = torch.full((ROWS, *q.shape[1:]), float("nan"), device=q.device)
        with capture():
            forward(layer, captured, *inputs, result)
        out.copy_(result[: len(q)])
        assert not result[len(q) :].any(), "rows of padding attend nothing"

    def replayed_lookahead(layer: int, step: Step, q: Tensor) -> None:
        if step.prefill:
            return lookahead(layer, step, q)
        assert runtime.wants_lookahead(layer, captured)
        predicted = padded(q)
        with capture():
            lookahead(layer, captured, predicted)

    runtime.forward, runtime.lookahead = replayed, replayed_lookahead  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "keys",
    [
        {"lookahead": {"partial_query": "predicted"}},
        {"lookahead": {"partial_query": "real"}},
        {"selection": {"granularity": "kv_head", "digest": "minmax"}},
        {"method": "infinigen"},
        {"selection": {"digest": "minmax_int8"}},
        {"selection": {"digest": "minmax_int8", "granularity": "kv_head", "aggregate": "max"}},
    ],
    ids=["predicted", "real", "per-head", "infinigen", "bytes", "bytes, per-head"],
)
def test_a_step_is_the_same_whoever_runs_its_operations(keys: dict[str, object]) -> None:
    """After every step outputs are alike and the maps of the three are equal, every frame of every layer. With digests
    in bytes of two: the native kernels round queries, too, and may choose another page."""
    keys = {"selection": {"digest": "minmax"}} | keys
    in_bytes = keys["selection"].get("digest") == "minmax_int8"  # type: ignore[attr-defined]
    engines = [engine(kernels, **keys) for kernels in ("torch", "native", "triton")[:: 2 if in_bytes else 1]]

    def compare_maps() -> None:
        first, *others = (decode_step(each).buffers.maps for each in engines)
        for maps in others:
            assert torch.equal(first.frame_of, maps.frame_of.cpu()) and torch.equal(first.page_of, maps.page_of.cpu())
            torch.testing.assert_close(first.importance, maps.importance.cpu(), atol=1e-4, rtol=1e-4)

    play(engines, GROWTH, after_step=compare_maps, near=1e-4)
    first, *others = (each.runtime.stats.layers for each in engines)
    assert sum(layer.recalled_pages for layer in first) > 0, "nothing was recalled: this test shows less"
    assert (first[1].cpu_tokens > 0) == ("method" not in keys), "the CPU computes for scout, and only for it"
    for stats in others:
        for mine, layer in zip(first, stats, strict=True):
            counted = ("selected_tokens", "cpu_tokens", "resident_hits", "resident_lookups", "recalled_pages")
            assert all(getattr(mine, name) == getattr(layer, name) for name in counted)


def test_a_late_step_waits_once_and_fails_its_own_requests_only() -> None:
    """The workers get none of one step's questions: all its layers together wait as long as one may. Its requests are
    named, with the pages that it wrote; those of the steps before and after it are served exactly."""
    made, layers, held = engine("triton", 0.5, layers=6, replayed=False, sparse="never"), 6, list[int]()
    partials = decode_step(made).cpu_attention
    assert isinstance(partials, MailboxCpuAttention)
    slow = HeldUp(partials, held.__contains__)
    try:
        for name in ("a", "b", "c"):
            made.add(name, 2 * FRAMES * PAGE - 3)
            made.prefill(name)
        made.step({"a": 1, "b": 1, "c": 1})
        before = made.ran
        time_left, waited = partials._time_left, []
        forward = made.runtime.forward

        def timed(*args: Any) -> None:
            left = int(time_left)
            forward(*args)
            waited.append(left - int(time_left))

        made.runtime.forward = timed  # type: ignore[method-assign]
        held.append(before.number + 2)  # `StepInputs.number` of the next step
        made.step({"c": 1, "a": 1}, tolerance=None)
        late = made.ran
        assert len(waited) == layers and sum(waited) == partials._allowed_ns
        made.step({"b": 1})
        failure = made.runtime.failure(late)
        assert failure is not None and isinstance(failure.error, DeadlineError)
        assert "workers.deadline_seconds=0.5" in str(failure.error)
        assert failure.request_ids == ["c", "a"]
        assert failure.pages == [made.sequences[name].pages[-1] for name in ("c", "a")]
        assert made.runtime.failure(before) is made.runtime.failure(made.ran) is None
        for name in ("a", "c"):
            made.preempt(name)
            made.prefill(name)
        made.step({"a": 1, "b": 1, "c": 1})
    finally:
        slow.close()


def test_workers_that_the_kernels_cannot_ask_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers\.kernel"):
        engine("triton", workers={"kernel": "torch"})
