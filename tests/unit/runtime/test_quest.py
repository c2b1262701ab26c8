"""The native decoder of method `quest` keeps what the next steps need of a request, and forgets it with the request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_backend.attention.quality import covered_tokens, mass_recall
from hybrid_backend.batch import DecodeRows
from hybrid_backend.in_place.step import InPlaceStep
from hybrid_backend.kernels import cpu
from tests.support.harness import PAGE, Engine, config, spec

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


def test_between_two_looks_at_all_pages_every_step_selects_among_those_that_the_last_one_kept() -> None:
    """Every output is that of the pages that were selected. A request that comes back begins anew."""
    selection = {"candidates": 0, "interval": 4}
    cfg = config(method="quest", sparse="always", selection=selection)
    engine = Engine(cfg, spec(layers=2), num_pages=256, is_witnessed=True)
    fused = engine.runtime.executor
    assert isinstance(fused, InPlaceStep)
    engine.add("long", 30 * PAGE + 1)
    engine.prefill("long")
    decode, seen = fused.decode, dict[int, list[list[int]]]()

    def logged(layer: int, step: Any, *rest: Any) -> None:
        decode(layer, step, *rest)
        seen.setdefault(layer, []).append(fused.selected(step.decode, 0)[0].tolist())

    fused.decode = logged  # type: ignore[method-assign]
    for _ in range(9):
        engine.step({"long": 1}, tolerance=None)
    for layer, found in seen.items():
        assert {len(pages) for pages in found} == {cfg.budget_pages}
        looks = [step for step in range(1, 10) if step == 1 or (30 * PAGE + 1 + step + layer) % 4 == 0]
        for first, end in zip(looks, [*looks[1:], 10], strict=True):
            between = found[first - 1 : end - 1]
            assert len(set().union(*between)) <= 4 * cfg.budget_pages + 2  # the steps begin two pages at most
        assert any(found[step - 1] != found[step - 2] for step in range(2, 10) if step not in looks)
    assert fused.host_bytes > 0
    engine.preempt("long")
    assert fused.host_bytes == 0
    engine.prefill("long")
    engine.step({"long": 1}, tolerance=None)
    assert fused.host_bytes > 0
    engine.close()


def test_spans_of_a_request_go_with_it() -> None:
    cfg = config(
        method="quest",
        sparse="always",
        selection={"candidates": 1},
        metrics={"sample_interval": 1},
    )
    engine = Engine(cfg, spec(), num_pages=256)
    fused = engine.runtime.executor
    assert isinstance(fused, InPlaceStep)
    engine.add("long", 60 * PAGE)
    engine.prefill("long")
    engine.add("twin", 60 * PAGE + 5, shared_with="long")
    engine.prefill("twin")
    assert fused.host_bytes == 0
    engine.step({"long": 1, "twin": 1}, tolerance=None)
    both = fused.host_bytes
    assert both > 0
    engine.preempt("twin")
    assert 0 < fused.host_bytes < both
    engine.prefill("twin")
    engine.step({"long": 1, "twin": 1}, tolerance=None)
    assert fused.host_bytes == both
    engine.drop("long")
    engine.drop("twin")
    assert fused.host_bytes == 0
    engine.close()


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_sampled_mass_is_the_attention_on_selected_tokens_and_layers_take_turns(
    monkeypatch: pytest.MonkeyPatch, granularity: str
) -> None:
    cfg = config(
        method="quest",
        sparse="always",
        selection={"granularity": granularity, "interval": 1},
        metrics={"sample_interval": 4},
    )
    engine = Engine(cfg, spec(), num_pages=256)
    stats, sample, seen = engine.runtime.stats, InPlaceStep._sample, Counter[tuple[int, int]]()

    def checked(self: InPlaceStep, layer: int, rows: DecodeRows, q: Tensor, selecting: Tensor, turn: int) -> None:
        before = stats.layers[layer].mass_sum
        sample(self, layer, rows, q, selecting, turn)
        r, lists = turn % 2, range(engine.model.num_kv_heads if granularity == "kv_head" else 1)
        chosen = torch.stack([self._decoder.selected(r, head).long() for head in lists])
        covered = covered_tokens(chosen, int(rows.seq_lens[r]), PAGE)
        pages = rows.page_table[r, : int(rows.num_pages[r])]
        blocks = engine.runtime.tiers.host.blocks(layer)
        expected = mass_recall(q[r], blocks, pages, covered, engine.model.num_kv_heads, engine.model.scale)
        assert abs(stats.layers[layer].mass_sum - before - expected) < 1e-5
        assert 0.02 < expected < 0.9
        seen[turn, layer] += 1

    monkeypatch.setattr(InPlaceStep, "_sample", checked)
    for name, tokens in (("long", 40 * PAGE + 3), ("longer", 50 * PAGE)):
        engine.add(name, tokens)
        engine.prefill(name)
    for _ in range(8):
        engine.step({"long": 1, "longer": 1}, tolerance=None)
    assert Counter(layer for _, layer in seen) == {0: 2, 1: 2, 2: 2}
    assert max(Counter(turn for turn, _ in seen).values()) == 1
    assert [layer.mass_samples for layer in stats.layers] == [2, 2, 2]
    engine.close()
