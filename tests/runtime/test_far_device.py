"""The CUDA tier on a device that is not the host (tests/runtime/far_device.py): what lies where, and who may touch it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from tests.runtime.far_device import Far, _pinned, build_guard, far_device
from tests.runtime.harness import PAGE, Engine, config, spec

SLOTS = 6


class FarEngine(Engine):
    def seen_by_device(self) -> list[Tensor]:
        _pinned.update(layer.untyped_storage().data_ptr() for layer in self.kv)
        return [Far(layer) for layer in self.kv]


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not torch.cuda.is_available():
        build_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def device(guard: None) -> Iterator[torch.device]:
    if torch.cuda.is_available():
        pytest.skip("a real device is there: tests/engine/test_gpu.py")
    with far_device() as device:
        yield device


KEYS = {
    "scout": {},
    "scout-per-head": {"selection": {"granularity": "kv_head"}},
    "scout-real": {"lookahead": {"partial_query": "real"}},
    "infinigen": {"method": "infinigen"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_prompts_and_decoding_on_a_device_that_is_not_the_host(
    device: torch.device, keys: dict[str, object], dtype: torch.dtype
) -> None:
    """Chunked prompts, a shared prefix, growth out of the slots, recalls, preemption: everything finds what it needs
    where it is, and what is not sparse is exact."""
    settings = config(slots_per_request=SLOTS, exact_layers=[0], recall={"intervals": 2}, **keys)
    made = FarEngine(settings, spec(2, dtype=dtype), num_pages=64, max_requests=3, device=device)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    try:
        made.add("a", 3 * PAGE)
        while made.sequences["a"].tokens < 3 * PAGE:
            made.step({"a": 20 if made.sequences["a"].tokens < 40 else 8}, tolerance=tolerance)
        made.add("b", 3 * PAGE + 5, shared_with="a")
        made.step({"a": 1, "b": 5}, tolerance=tolerance)
        for _ in range(3):
            made.step({"b": 1, "a": 1}, tolerance=tolerance)
        made.preempt("a")
        made.step({"a": made.sequences["a"].prompt, "b": 1}, tolerance=tolerance)
        made.add("c", SLOTS * PAGE - 2)
        made.step({"c": SLOTS * PAGE - 2}, tolerance=tolerance)
        for _ in range(6):
            made.step({"c": 1, "a": 1}, lookahead_noise=0.3, tolerance=None)
        gauges = made.runtime.gauges()
        assert gauges["hybrid_slots_in_use"] > 0 and gauges["hybrid_regions_in_use"] == 3
        for name in ("a", "b", "c"):
            made.drop(name)
        assert made.runtime.gauges()["hybrid_slots_in_use"] == 0
    finally:
        made.close()
