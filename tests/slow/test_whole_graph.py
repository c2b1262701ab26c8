"""A small model whose decoding steps are one graph, for every method that decodes by launches alone: on a GPU, or on
what stands in for one (far_device.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from tests.support.far_device import late
from tests.support.gpu import ON_GPU
from tests.support.harness import PAGE, config, watch
from tests.support.tiny_engine import CapturedEngine, TinyModel

ROWS = 3
LAYERS, TOKENS = (3, 20) if ON_GPU else (2, 8)  # the interpreter is slow
MODEL = TinyModel(LAYERS)
FRAMES = {"frames_per_request": 4, "exact_layers": [0], "recall": {"intervals": 2}}
# Everything is attended: by the device what its frames hold, and the rest by the CPU or over the bus.
EXACT: dict[str, dict[str, Any]] = {
    "scout": {**FRAMES, "sparse": "never"},
    "infinigen": {**FRAMES, "method": "infinigen", "sparse": "never"},
    "headinfer": {"method": "headinfer"},
    "dense": {"method": "dense"},
    "hgca": {"method": "hgca", "sparse": "never", "hgca": {"window_tokens": 4 * PAGE}},
    "clo": {"method": "clo", "budget_tokens": 20 * PAGE, "clo": {"persistent": ["1:1"]}},
}
SPARSE: dict[str, dict[str, Any]] = {
    "scout": {**FRAMES, "metrics": {"sample_interval": 1}},
    "scout of bytes": {**FRAMES, "selection": {"digest": "minmax_int8"}},
    "scout of codes": {**FRAMES, "selection": {"digest": "codes"}},
    "scout, a selection for four steps": {**FRAMES, "selection": {"interval": 4}},
    "scout, a selection per head": {**FRAMES, "selection": {"granularity": "kv_head"}},
    "infinigen": {**FRAMES, "method": "infinigen", "frames_per_request": 5},
    "hgca": {"method": "hgca", "exact_layers": [0], "hgca": {"window_tokens": 2 * PAGE, "beta": 0.5}},
    "clo": {**FRAMES, "method": "clo", "clo": {"eta": 0.3, "persistent": ["1:0"]}},
}


def engine(device: torch.device, keys: dict[str, Any], captures: bool = True) -> CapturedEngine:
    return CapturedEngine(
        config(**keys), MODEL, parks=False, max_requests=ROWS, device=device, captures=captures
    )  # fmt: skip


def serve(running: CapturedEngine) -> dict[str, list[int]]:
    """Two requests, one of which is gone before the third begins, beside the other; that one is preempted once."""
    rng = torch.Generator().manual_seed(1)
    done = {}
    for name, length in (("a", 6 * PAGE - 3), ("b", 3 * PAGE + 5)):
        running.add(name, torch.randint(50, (length,), generator=rng).tolist())
    for step in range(3 * TOKENS):
        if step == TOKENS // 2:
            done["b"] = running.drop("b").tokens
            running.add("c", torch.randint(50, (9 * PAGE - 8,), generator=rng).tolist())
        if step == TOKENS:
            running.preempt("a")
        running.step()
        if step > TOKENS and all(len(each.answer) >= TOKENS for each in running.requests.values()):
            break
    done |= {name: running.drop(name).tokens for name in ("a", "c")}
    left = running.runtime.gauges()
    assert left["hybrid_frames_in_use"] == left["hybrid_resident_requests"] == 0 and not running.failed
    return done


@pytest.mark.parametrize("name", EXACT)
def test_a_graph_of_what_attends_everything_answers_as_the_model(device: torch.device, name: str) -> None:
    made = engine(device, EXACT[name])
    with late():
        for tokens in serve(made).values():
            prompt = len(tokens) - TOKENS // 2
            assert tokens[prompt:] == MODEL.follow(tokens)[prompt - 1 : -1]


@pytest.mark.parametrize("name", SPARSE if ON_GPU else ["scout", "scout, a selection for four steps", "clo"])
def test_a_graph_of_what_is_sparse_answers_and_samples_as_the_same_kernels_launched_one_by_one(
    device: torch.device, name: str
) -> None:
    """Of requests that come, are preempted and go. No step waits for the device (`busy`)."""
    answers, counted = [], []
    for captures in (True, False):
        made = engine(device, SPARSE[name], captures)
        if name == "scout":
            watch(made, "step", after=lambda *_, made=made: made.executor.samples.finish())
        with late():
            answers.append(serve(made))
        counted.append(made.runtime.stats.layers[1])
        assert counted[-1].selected_tokens < counted[-1].context_tokens, "nothing was sparse: this shows less"
        made.close()
    assert answers[0] == answers[1]
    if name == "scout":
        replayed, launched = counted
        assert replayed.mass_samples == launched.mass_samples > TOKENS
        assert replayed.cosine_samples == launched.cosine_samples > TOKENS
        assert 0 < replayed.mass_sum < replayed.mass_samples
        assert replayed.mass_sum == pytest.approx(launched.mass_sum, abs=1e-3)
        assert replayed.cosine_sum == pytest.approx(launched.cosine_sum, abs=1e-3)
