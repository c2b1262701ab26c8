"""One native call per layer: the same as its operations one by one; what it keeps of a request goes with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_backend.attention.quality import covered_tokens, mass_recall
from hybrid_backend.errors import ConfigError
from hybrid_backend.execution import DecodeStep
from hybrid_backend.execution.fused import FusedStep
from hybrid_backend.kernels import cpu
from hybrid_backend.methods.dense import Dense
from hybrid_backend.methods.selective import Selective
from hybrid_backend.step import DecodeRows
from tests.support.attended import Attended
from tests.support.harness import PAGE, Engine, config, spec

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


KEYS = {
    "softmax": {"selection": {"digest": "minmax", "candidates": 0, "interval": 1}},
    "per head": {"selection": {"digest": "minmax", "candidates": 0, "interval": 1, "granularity": "kv_head"}},
    "max": {"selection": {"aggregate": "max", "interval": 1}},
    "layer by layer": {"selection": {"digest": "minmax", "interval": 1}, "budget_factors": [0.75, 1, 1.25]},
    "dense": {"method": "dense"},
}


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", KEYS)
def test_the_fused_step_is_the_sequence_of_operations(monkeypatch: pytest.MonkeyPatch, name: str, kernels: str) -> None:
    """Two engines live the same lives, one of them operation by operation: every row attends the same pages, gives the
    same output and is counted alike. Scored page by page, by digests in the cache's type: bytes and the second level of
    the shipped configuration estimate these scores."""
    made = []
    for executor in (FusedStep, DecodeStep):
        if executor is DecodeStep:
            for method in (Selective, Dense):
                monkeypatch.setattr(method, "is_fused", classmethod(lambda *_: False))
        cfg = config(
            tiers="unified", sparse="always", exact_layers=[1], lookahead={"enabled": False},
            device_kernels="native" if executor is FusedStep else kernels, **KEYS[name],
        )  # fmt: skip
        made.append(Engine(cfg, spec(layers=3), seed=9, is_witnessed=True))
        assert isinstance(made[-1].runtime.executor, executor)
    fused, unfused = made
    attended: list[list[Attended]] = [[], []]
    for each, log in zip(made, attended, strict=True):
        assert each.witness is not None
        monkeypatch.setattr(each.witness, "of", _logged(each.witness.of, log))
        each.add("long", 14 * PAGE - 3)
        each.prefill("long", chunk=50)
        each.add("short", 20)
        each.prefill("short")
    for _ in range(2 * PAGE):
        outs = [each.step({"short": 1, "long": 1}, tolerance=None) for each in made]
        for request in outs[0]:
            torch.testing.assert_close(outs[0][request], outs[1][request], atol=1e-5, rtol=1e-5)
    assert len(attended[0]) == len(attended[1]) == 2 * PAGE * 2 * 3
    for mine, others in zip(*attended, strict=True):
        assert torch.equal(mine.tokens, others.tokens)
    assert name == "dense" or not all(bool(row.tokens.all()) for row in attended[0])
    for mine, others in zip(fused.runtime.stats.layers, unfused.runtime.stats.layers, strict=True):
        assert vars(mine) | {"attention_seconds": 0} == vars(others)
    for each in made:
        each.close()


def _logged(of: Callable[..., Attended], log: list[Attended]) -> Callable[..., Attended]:
    def logged(*args: Any) -> Attended:
        log.append(of(*args))
        return log[-1]

    return logged


def test_between_two_looks_at_all_pages_every_step_selects_among_those_that_the_last_one_kept() -> None:
    """Every output is that of the pages that were selected. A request that comes back begins anew."""
    selection = {"candidates": 0, "interval": 4}
    cfg = config(tiers="unified", sparse="always", lookahead={"enabled": False}, selection=selection)
    engine = Engine(cfg, spec(layers=2), num_pages=256, is_witnessed=True)
    fused = engine.runtime.executor
    assert isinstance(fused, FusedStep)
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
    with pytest.raises(ConfigError, match=r"selection.interval: 4 needs pages that are attended in place"):
        Engine(config(tiers="separate", selection=selection), spec(layers=2))


def test_spans_of_a_request_go_with_it() -> None:
    cfg = config(
        tiers="unified",
        sparse="always",
        lookahead={"enabled": False},
        selection={"candidates": 1},
        metrics={"sample_interval": 1},
    )
    engine = Engine(cfg, spec(), num_pages=256)
    fused = engine.runtime.executor
    assert isinstance(fused, FusedStep)
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
        tiers="unified",
        sparse="always",
        lookahead={"enabled": False},
        selection={"granularity": granularity, "interval": 1},
        metrics={"sample_interval": 4},
    )
    engine = Engine(cfg, spec(), num_pages=256)
    stats, sample, seen = engine.runtime.stats, FusedStep._sample, Counter[tuple[int, int]]()

    def checked(self: FusedStep, layer: int, rows: DecodeRows, q: Tensor, selecting: Tensor, turn: int) -> None:
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

    monkeypatch.setattr(FusedStep, "_sample", checked)
    for name, tokens in (("long", 40 * PAGE + 3), ("longer", 50 * PAGE)):
        engine.add(name, tokens)
        engine.prefill(name)
    for _ in range(8):
        engine.step({"long": 1, "longer": 1}, tolerance=None)
    assert Counter(layer for _, layer in seen) == {0: 2, 1: 2, 2: 2}
    assert max(Counter(turn for turn, _ in seen).values()) == 1
    assert [layer.mass_samples for layer in stats.layers] == [2, 2, 2]
    engine.close()
