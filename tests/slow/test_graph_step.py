"""One step, whoever runs its operations: plain torch, native C++, and Triton as a CUDA graph would replay it (fixed
buffers, padded batch, launches only).

Where no GPU is, its kernels run under Triton's interpreter; the CPU workers are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.batch import Step, captured_step
from hybrid_backend.errors import ConfigError
from tests.support.harness import Engine, config, decode_step, spec
from tests.support.scenario import GROWTH, play

FRAMES, ROWS = 6, 3


def engine(kernels: str, **keys: object) -> Engine:
    """All kinds draw the same random numbers: they look ahead in the same steps, the sampled ones."""
    base: dict[str, object] = {
        "frames_per_request": FRAMES, "exact_layers": [0], "device_kernels": kernels, "whole_layers": [],
        "recall": {"intervals": 2}, "metrics": {"sample_interval": 1},
        "workers": {"threads": 2, "deadline_seconds": 20},
    }  # fmt: skip
    made = Engine(config(**base | keys), spec(2), num_pages=64, max_requests=ROWS)
    if kernels == "triton":
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


def test_workers_that_the_kernels_cannot_ask_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers\.kernel"):
        engine("triton", workers={"kernel": "torch"})
