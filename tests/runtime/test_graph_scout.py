"""The step that a CUDA graph captures (fixed buffers, padded batch, launches only) equals the eager one.

Where no GPU is, its kernels run under Triton's interpreter; the CPU workers are the real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.kernels import cpu
from hybrid_backend.methods.graph_scout import GraphScout, GraphShape
from tests.runtime.harness import PAGE, Engine, config, spec

SLOTS, BUDGET, COLUMNS, ROWS, INTERVAL, LAYERS = 6, 4, 16, 3, 2, 2
EXACT = 0  # the exact layer


class Lockstep:
    """An eager engine whose decode steps are recorded, and the graph-shaped step that replays them."""

    def __init__(self, predicted: bool) -> None:
        query = "predicted" if predicted else "real"
        self.engine = Engine(
            config(
                tiers="separate", slots_per_request=SLOTS, exact_layers=[EXACT],
                recall={"intervals": INTERVAL}, lookahead={"partial_query": query},
            ),
            spec(LAYERS),
        )  # fmt: skip
        how, model = self.engine.cfg.selection, self.engine.model
        self.shape = GraphShape(
            rows=ROWS, heads=model.num_heads, columns=COLUMNS, regions=4, slots=SLOTS, budget=BUDGET,
            sinks=1, recent=1, aggregate=how.aggregate, bound=how.bound, scale=model.scale, recalls=BUDGET,
            predicted=predicted, patience=10**10 if torch.cuda.is_available() else 10**7, splits=2,
        )  # fmt: skip
        self.host = [x.clone().pin_memory() if torch.cuda.is_available() else x.clone() for x in self.engine.kv]
        tiers = self.engine.runtime.tiers
        assert tiers.digests is not None
        self.digests: list[Tensor | None] = [
            tiers.digests.layers[layer].clone() if layer in tiers.digests.layers else None for layer in range(LAYERS)
        ]
        self.pool = cpu.Pool(2)
        self.graph = GraphScout(self.shape, self.host, self.digests, self.pool)
        self.regions: dict[str, int] = {}
        self._record()

    def _record(self) -> None:
        runtime, self.calls = self.engine.runtime, list[tuple[Any, ...]]()
        forward, lookahead = runtime.forward, runtime.lookahead

        def recorded_forward(layer: int, step: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            forward(layer, step, q, k, v, out)
            self.calls.append(("attend", layer, q, k, v, out.clone()))

        def recorded_lookahead(layer: int, step: Any, q: Tensor) -> None:
            self.calls.append(("lookahead", layer, q.clone()))
            lookahead(layer, step, q)

        runtime.forward, runtime.lookahead = recorded_forward, recorded_lookahead  # type: ignore[method-assign]

    def admit(self, name: str, prompt: int) -> None:
        self.engine.add(name, prompt)
        self.engine.prefill(name)
        sequence = self.engine.sequences[name]
        digests = self.engine.runtime.tiers.digests
        assert digests is not None
        for layer in range(LAYERS):
            self.host[layer][sequence.pages] = self.engine.kv[layer][sequence.pages]
            mine = self.digests[layer]
            if mine is not None:
                mine[sequence.pages] = digests.layers[layer][sequence.pages].to(mine.device)
        self.regions[name] = min(set(range(4)) - set(self.regions.values()))
        self.graph.admit(self.regions[name], torch.tensor(sequence.pages, dtype=torch.int32))

    def drop(self, name: str) -> None:
        self.engine.drop(name)
        self.graph.release(self.regions.pop(name))

    def step(self, names: list[str], noise: float) -> float:
        """One decode step of both; returns the largest difference of their outputs."""
        self.calls.clear()
        self.engine.step(dict.fromkeys(names, 1), lookahead_noise=noise, tolerance=None)
        self._load(names)
        self.graph.begin()
        worst = 0.0
        for what, layer, *tensors in self.calls:
            if what == "lookahead":
                self.graph.lookahead(layer, self._padded(tensors[0]))
                continue
            q, k, v, expected = tensors
            out = self.graph.attend(layer, self._padded(q), self._padded(k), self._padded(v))
            worst = max(worst, float((out[: len(names)].cpu() - expected).abs().max()))
            assert not out[len(names) :].any(), "rows of padding attend nothing"
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        assert int(self.graph.late) == 0
        self.graph.mail.check(int(self.graph.inputs.number))
        return worst

    def _padded(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(ROWS, *x.shape[1:])
        padded[: len(x)] = x
        return padded.to(self.graph.maps.page_of.device)

    def _load(self, names: list[str]) -> None:
        now = self.graph.inputs
        for each in (now.num_pages, now.lengths, now.positions, now.regions, now.budgets):
            each.zero_()
        now.pages.fill_(-1)
        for r, name in enumerate(names):
            sequence = self.engine.sequences[name]
            pages = -(-sequence.tokens // PAGE)
            now.table[r, :pages] = torch.tensor(sequence.pages[:pages], dtype=torch.int32)
            now.num_pages[r], now.lengths[r], now.positions[r] = pages, sequence.tokens, sequence.tokens - 1
            now.pages[r], now.regions[r] = sequence.pages[pages - 1], self.regions[name]
            now.budgets[r] = BUDGET if pages > SLOTS else pages
        number = self.engine.runtime._steps - 1
        now.number.fill_(number)
        for layer in range(LAYERS):
            now.due[layer] = int((number + layer) % INTERVAL == 0)
        self.graph.write_rows(torch.tensor([self.regions[name] for name in names]))

    def close(self) -> None:
        self.graph.close()
        self.pool.close()
        self.engine.close()


def resident(lockstep: Lockstep, name: str, layer: int) -> tuple[set[int], set[int]]:
    """Logical pages of a request that have a slot: with the eager step, and with the graph-shaped one."""
    tiers = lockstep.engine.runtime.tiers
    region = tiers.slots.region(name)
    assert region is not None
    eager = {int(p) for p in tiers.residency.held(layer, torch.tensor([region]))[0] if p >= 0}
    first = lockstep.regions[name] * SLOTS
    graph = {int(p) for p in lockstep.graph.maps.page_of[layer, first : first + SLOTS] if p >= 0}
    return eager, graph


@pytest.mark.parametrize("predicted", [True, False], ids=["predicted", "real"])
def test_the_graph_shaped_step_equals_the_eager_one(predicted: bool) -> None:
    """Two requests of unlike length grow out of their slots, one goes and another comes; pages are recalled."""
    lockstep = Lockstep(predicted)
    try:
        lockstep.admit("a", 6 * PAGE - 1)
        lockstep.admit("b", 3 * PAGE)
        for _ in range(3):
            assert lockstep.step(["a", "b"], noise=0.3) < 1e-4
        lockstep.drop("b")
        lockstep.admit("c", 6 * PAGE - 1)
        for _ in range(6):
            assert lockstep.step(["c", "a"], noise=0.3) < 1e-4
        for name in ("a", "c"):
            for layer in range(LAYERS):
                eager, graph = resident(lockstep, name, layer)
                assert eager == graph, f"{name}, layer {layer}"
        stats = lockstep.engine.runtime.stats.layers
        assert sum(layer.recalled_pages for layer in stats) > 0, "nothing was recalled: this test shows less"
        assert sum(layer.cpu_tokens for layer in stats[1:]) > 0, "the CPU had nothing to do: this test shows less"
    finally:
        lockstep.close()
