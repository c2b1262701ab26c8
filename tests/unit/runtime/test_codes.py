"""Digests in codes, whoever runs the steps: those of every full page are of what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_backend.in_place.step import InPlaceStep
from hybrid_backend.kernels import cpu
from tests.support.harness import PAGE, Engine, config, spec

CASES: dict[str, dict[str, Any]] = {
    "quest": {"method": "quest", "device_kernels": "native"},
    "scout": {"device_kernels": "torch"},
    "scout, native": {"device_kernels": "native"},
    "infinigen": {"method": "infinigen", "device_kernels": "torch"},
    "clo": {"method": "clo", "device_kernels": "torch"},
}


@pytest.mark.parametrize("name", CASES)
def test_codes_of_full_pages_are_of_what_they_hold(name: str) -> None:
    """Through a prompt in chunks, decoding over page ends, a shared prefix and a preempted request, whose pages others
    get; and what does not fit is attended in part."""
    keys = CASES[name]
    if keys["device_kernels"] == "native" and not cpu.available():
        pytest.skip(str(cpu.why_unavailable()))
    cfg = config(sparse="always", exact_layers=[1], selection={"digest": "codes"}, **keys)
    engine = Engine(cfg, spec(layers=3), seed=4)
    assert isinstance(engine.runtime.executor, InPlaceStep) == (name == "quest")
    store = engine.runtime.tiers.digests
    assert store is not None and set(store.layers) == {0, 2}

    def check() -> None:
        for sequence in engine.sequences.values():
            full = torch.tensor(sequence.pages[: sequence.tokens // PAGE])
            for layer, rows in store.layers.items():
                assert rows.dtype == torch.uint8
                held = rows[full].clone()
                store.rebuild(layer, full)
                assert torch.equal(rows[full], held)

    engine.add("a", 14 * PAGE - 3)
    engine.prefill("a", chunk=50)
    check()
    for _ in range(PAGE + 5):
        engine.step({"a": 1}, tolerance=None)
    engine.add("b", 14 * PAGE, shared_with="a")
    engine.prefill("b")
    for _ in range(5):
        engine.step({"a": 1, "b": 1}, tolerance=None)
    check()
    engine.preempt("a")
    engine.prefill("a")
    for _ in range(PAGE):
        engine.step({"a": 1, "b": 1}, tolerance=None)
    check()
    engine.close()
