"""The rates of attention that `apex` measures at start, over real tiers with the threads and kernels that serve."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.errors import DeadlineError
from hybrid_backend.hardware import find_hardware, timing
from hybrid_backend.kernels import cpu
from hybrid_backend.methods.apex.rates import ROWS, cpu_rate, device_rate, measured_rates
from tests.support.harness import PAGE, Engine, config

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))

MODEL = ModelSpec(2, num_heads=8, num_kv_heads=4, head_dim=64, scale=0.125, dtype=torch.float32)
PAGES = 2048  # 64 MiB in a layer
KEYS = {"method": "apex", "exact_layers": [], "workers": {"threads": 2, "deadline_seconds": 20}}


def engine(pages: int = PAGES) -> Engine:
    apex = {"strategy": "lockstep", "device_tokens": pages * PAGE}
    return Engine(config(**KEYS, apex=apex), MODEL, num_pages=pages)


def test_a_rate_is_the_bytes_that_are_read_by_the_time_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every attention takes a second: all pages of a layer of 64 MiB are read."""
    runtime = engine().runtime
    layer, frames = runtime.tiers.host.layers[0], runtime.tiers.frames.layers[0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    assert cpu_rate(MODEL, layer, runtime.workers, deadline=20) == layer.nbytes
    assert device_rate(MODEL, frames, runtime.tiers.operations) == frames.nbytes


def test_measured_rates_replace_those_of_the_named_machine_and_nothing_else() -> None:
    runtime, machine = engine().runtime, find_hardware("a10")
    measured = measured_rates(machine, MODEL, runtime.tiers, runtime.workers, deadline=20)
    assert measured.cpu_attention_bytes_per_s.source == "measured at start"
    assert measured.cpu_attention_achieved == measured.host_read_achieved > 0
    assert measured.device_attention_bytes_per_s is not None
    assert measured.device_attention_bytes_per_s.at(ROWS) > 0
    for name in ("hbm_bytes_per_s", "bf16_flops_per_s", "layer_overhead_s", "host_device_bytes_per_s", "device"):
        assert getattr(measured, name) == getattr(machine, name)


def test_a_tier_that_fits_the_caches_keeps_the_rates_of_the_named_machine() -> None:
    runtime, machine = engine(pages=256).runtime, find_hardware("a10")
    assert cpu_rate(MODEL, runtime.tiers.host.layers[0], runtime.workers, deadline=20) is None
    assert device_rate(MODEL, runtime.tiers.frames.layers[0], runtime.tiers.operations) is None
    assert measured_rates(machine, MODEL, runtime.tiers, runtime.workers, deadline=20) == machine


def test_workers_that_are_late_at_start_are_an_error_and_no_rate() -> None:
    runtime = engine().runtime
    with pytest.raises(DeadlineError, match=r"measurement of apex\.hardware: auto"):
        cpu_rate(MODEL, runtime.tiers.host.layers[0], runtime.workers, deadline=0)
