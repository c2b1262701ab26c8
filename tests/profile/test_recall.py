"""The simulated CPU ratios are those that the engine then has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_backend.profile.measure import measure_layer, slots_of
from hybrid_backend.profile.network import Layer
from hybrid_backend.profile.recall import NEVER, Decoded, cpu_ratios
from tests.runtime.harness import PAGE, Engine, config, spec

STEPS = 60


class _Scaled(torch.nn.Module):
    """As much of a layer as `measure_layer` looks at."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.scaling = scale  # type: ignore[assignment]


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize("interval", [1, 4, NEVER])
def test_the_simulation_counts_what_the_engine_counts(interval: int, granularity: str) -> None:
    """A sequence decoded by the real runtime; its queries and keys, measured afterwards."""
    keys: dict[str, Any] = {"tiers": "separate", "selection": {"granularity": granularity}, "slots_per_request": 6}
    keys["recall"] = {"enabled": interval != NEVER, "intervals": max(1, interval)}
    cfg = config(**keys, sparse="always", metrics={"sample_interval": 0})
    engine = Engine(cfg, spec(layers=2))
    sequence = engine.add("a", 15 * PAGE)
    engine.prefill("a")
    queries: list[list[Tensor]] = [[], []]
    forward = engine.runtime.forward

    def log(layer: int, step: Any, q: Tensor, *others: Tensor) -> None:
        queries[layer].append(q[0].clone())
        forward(layer, step, q, *others)

    engine.runtime.forward = log  # type: ignore[method-assign, assignment]
    stats = engine.runtime.stats.layers
    counted = [[(entry.selected_tokens, entry.cpu_tokens)] for entry in stats]
    first = 0
    begin = engine.runtime.begin_step

    def number(batch: Any) -> Any:
        nonlocal first
        step = begin(batch)
        first = first or step.number
        return step

    engine.runtime.begin_step = number  # type: ignore[method-assign]
    for _ in range(STEPS):
        engine.step({"a": 1}, tolerance=None)
        for entry, log_of in zip(stats, counted, strict=True):
            log_of.append((entry.selected_tokens, entry.cpu_tokens))
    engine.close()
    assert sum(total for total, _ in counted[1]) > 0
    for index in range(2):
        real = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(counted[index], counted[index][1:], strict=False)]
        k = torch.stack(sequence.kv[index])[:, :, 0]
        layer = Layer(index + first, _Scaled(engine.model.scale), None)
        q = torch.stack(queries[index])
        measured = measure_layer(layer, cfg, q, None, k, [i for i in (interval,) if i])
        assert measured.curves[slots_of(cfg)][interval] == pytest.approx(real, abs=1e-5)
        assert max(real) > 0


def _decoded(chosen: list[list[int]], pages: int, page_size: int = 4) -> Decoded:
    """Whole pages throughout; a chosen page's score is 1, others have 0."""
    mask = torch.zeros(len(chosen), 1, pages, dtype=torch.bool)
    for step, ids in enumerate(chosen):
        mask[step, 0, ids] = True
    lens = torch.full((len(chosen),), pages * page_size)
    return Decoded(mask, mask[:, 0].float(), lens, page_size)


def test_with_slots_for_everything_the_cpu_has_nothing_to_do() -> None:
    decoded = _decoded([[0, 1], [2, 3], [4, 5]], pages=6)
    assert cpu_ratios(decoded, 6, [1, 2, NEVER]).sum() == 0


def test_a_recalled_page_counts_from_the_next_step_on() -> None:
    decoded = _decoded([[0, 1], [2, 1], [2, 1], [2, 1]], pages=6)
    every, late, never = cpu_ratios(decoded, 2, [1, 3, NEVER], phase=1)
    assert every.tolist() == [0, 0.5, 0, 0]
    assert late.tolist() == [0, 0.5, 0.5, 0]  # steps 2, 5, ... of phase 1: the copy of step 2 is there at step 3
    assert never.tolist() == [0, 0.5, 0.5, 0.5]
