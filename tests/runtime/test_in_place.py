"""Decoding in place: the second level of digests belongs to a request and goes with it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from hybrid_backend.attention.quality import covered_tokens, mass_recall
from hybrid_backend.kernels import cpu
from hybrid_backend.methods.in_place import InPlace
from hybrid_backend.step import DecodeRows
from tests.runtime.harness import PAGE, Engine, config, spec

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


def test_spans_of_a_request_go_with_it() -> None:
    cfg = config(
        tiers="unified",
        sparse="always",
        lookahead={"enabled": False},
        selection={"candidates": 1},
        metrics={"sample_interval": 1},
    )
    engine = Engine(cfg, spec(), num_pages=256)
    method = engine.runtime.method
    assert method.in_place is not None
    engine.add("long", 60 * PAGE)
    engine.prefill("long")
    engine.add("twin", 60 * PAGE + 5, shared_with="long")
    engine.prefill("twin")
    assert method.host_bytes == 0
    engine.step({"long": 1, "twin": 1}, tolerance=None)
    both = method.host_bytes
    assert both > 0
    engine.preempt("twin")
    assert 0 < method.host_bytes < both
    engine.prefill("twin")
    engine.step({"long": 1, "twin": 1}, tolerance=None)
    assert method.host_bytes == both
    engine.drop("long")
    engine.drop("twin")
    assert method.host_bytes == 0
    engine.close()


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_sampled_mass_is_the_attention_on_selected_tokens_and_layers_take_turns(
    monkeypatch: pytest.MonkeyPatch, granularity: str
) -> None:
    cfg = config(
        tiers="unified",
        sparse="always",
        lookahead={"enabled": False},
        selection={"granularity": granularity},
        metrics={"sample_interval": 4},
    )
    engine = Engine(cfg, spec(), num_pages=256)
    stats, sample, seen = engine.runtime.stats, InPlace._sample, Counter[tuple[int, int]]()

    def checked(self: InPlace, layer: int, rows: DecodeRows, q: Tensor, selecting: Tensor, turn: int) -> None:
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

    monkeypatch.setattr(InPlace, "_sample", checked)
    for name, tokens in (("long", 40 * PAGE + 3), ("longer", 50 * PAGE)):
        engine.add(name, tokens)
        engine.prefill(name)
    for _ in range(8):
        engine.step({"long": 1, "longer": 1}, tolerance=None)
    assert Counter(layer for _, layer in seen) == {0: 2, 1: 2, 2: 2}
    assert max(Counter(turn for turn, _ in seen).values()) == 1
    assert [layer.mass_samples for layer in stats.layers] == [2, 2, 2]
    engine.close()
