"""The simulated CPU ratios are those that the engine then has."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_backend.kernels import oracle
from hybrid_backend.tools.profile.measure import Decoded, cpu_ratios, measure_layer
from hybrid_backend.tools.profile.network import Layer
from tests.support.harness import PAGE, Engine, config, spec

STEPS = 60


class _Scaled(torch.nn.Module):
    """As much of a layer as `measure_layer` looks at."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.scaling = scale  # type: ignore[assignment]


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize("interval", [1, 4])
def test_the_simulation_counts_what_the_engine_counts(interval: int, granularity: str) -> None:
    """A sequence decoded by the real runtime; its queries and keys, measured afterwards."""
    keys: dict[str, Any] = {"selection": {"granularity": granularity}, "frames_per_request": 6}
    keys["recall"] = {"intervals": interval}
    cfg = config(**keys, sparse="always", metrics={"sample_interval": 0})
    engine = Engine(cfg, spec(layers=2))
    sequence = engine.add("a", 15 * PAGE)
    queries: list[list[Tensor]] = [[], []]
    forward = engine.runtime.forward

    def log(layer: int, step: Any, q: Tensor, *others: Tensor) -> None:
        queries[layer] += list(q.clone())
        forward(layer, step, q, *others)

    engine.runtime.forward = log  # type: ignore[method-assign, assignment]
    engine.prefill("a")
    counted: list[list[tuple[float, float]]] = [[(0, 0)], [(0, 0)]]
    for _ in range(STEPS):
        engine.step({"a": 1}, tolerance=None)
        for entry, log_of in zip(engine.runtime.stats.layers, counted, strict=True):
            log_of.append((entry.selected_tokens, entry.cpu_tokens))
    assert sum(total for total, _ in counted[1]) > 0
    for index in range(2):
        real = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(counted[index], counted[index][1:], strict=False)]
        k, q = torch.stack(sequence.kv[index])[:, :, 0], torch.stack(queries[index])
        layer = Layer(index, _Scaled(engine.model.scale), None)
        prompt, decoded = q[-STEPS - 1 : -STEPS], q[-STEPS:]
        measured = measure_layer(layer, cfg, prompt, decoded, None, k, [interval])
        assert measured.ratios[interval] == pytest.approx(fmean(real), abs=1e-5)
        assert max(real) > 0


def _ratios(chosen: list[list[int]], pages: int, frames: int, intervals: list[int], phase: int = 0) -> Tensor:
    """A budget of two pages, whole ones, of which these are selected at each step; a third one grows."""
    cfg = config(budget_tokens=3 * PAGE, sinks=0, recent=1, sparse="always")
    scores = torch.zeros(len(chosen), 1, pages + 1)
    for step, ids in enumerate(chosen):
        scores[step, 0, ids] = 1.0
    lens = torch.arange(pages * PAGE + 2, pages * PAGE + 2 + len(chosen))
    first = torch.tensor(sorted([*chosen[0], pages] if frames < pages else range(frames)), dtype=torch.int32)
    importance = scores[0, 0, first.long()].masked_fill(first == pages, float("inf"))
    decoded = Decoded(scores, lens, (first, importance))
    return cpu_ratios(oracle, cfg, decoded, frames, intervals, phase)


def test_with_frames_for_everything_the_cpu_has_nothing_to_do() -> None:
    assert _ratios([[0, 1], [2, 3], [4, 5]], 6, 7, [1, 2]).sum() == 0


def test_a_recalled_page_counts_from_the_next_step_on() -> None:
    """Of two pages and a part of one, one page is missing until a recall brings it."""
    every, late = _ratios([[0, 1], [2, 1], [2, 1], [2, 1], [2, 1]], 6, 3, [1, 3], phase=1)
    missing = [PAGE / (2 * PAGE + 2 + step) for step in range(5)]
    assert every.tolist() == pytest.approx([0, missing[1], 0, 0, 0])
    assert late.tolist() == pytest.approx([0, missing[1], missing[2], 0, 0])  # due at step 2, there at step 3
