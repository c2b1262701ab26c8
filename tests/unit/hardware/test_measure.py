"""`hybrid profile --hardware` on this machine, for real and short."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Curve, Hardware, Number, find_hardware
from hybrid_backend.kernels import cpu
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.hardware import measure as measure_module
from hybrid_backend.tools.plan.hardware.measure import SPREAD, _doubts, _medians, measure, profile_hardware, table
from hybrid_backend.tools.plan.hardware.probes import Probe
from hybrid_backend.tools.plan.simulate import decode_step, simulated_methods

SHAPE = ModelShape("small", 4, 4, 2, 64, 256, 512, 1000, "bfloat16", True, 0, (None,) * 4)
SIZE = 64 << 20

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native kernels are not built")


@pytest.fixture(scope="module")
def profile() -> Hardware:
    return measure(device="cpu", shape=SHAPE, rounds=1, memory_bytes=SIZE)


def test_everything_that_is_promised_is_measured(profile: Hardware) -> None:
    usable = len(os.sched_getaffinity(0))
    assert profile.device == "cpu"
    assert profile.cores == usable
    for name in ("host_read_bytes_per_s", "cpu_attention_bytes_per_s"):
        curve = getattr(profile, name)
        assert [x for x, _ in curve.points][-1] == usable
        assert all(1e6 < rate < 1e13 for _, rate in curve.points), name
    assert [x for x, _ in profile.host_device_bytes_per_s.points] == [4096.0 * 4**i for i in range(7)]
    assert profile.linear_bytes_per_s is not None
    assert [x for x, _ in profile.linear_bytes_per_s.points] == [1, 4, 16, 64]
    assert profile.device_attention_bytes_per_s is not None
    assert 0 < profile.cpu_job_overhead_s.value < 1
    assert 0 < profile.layer_overhead_s.value < 1


def test_the_cpu_device_tier_is_marked_as_such(profile: Hardware) -> None:
    assert profile.name.startswith("CPU device tier")
    assert "CPU device tier" in profile.host_device_bytes_per_s.source


def test_every_number_tells_whether_it_was_measured(profile: Hardware) -> None:
    for field in Hardware.model_fields:
        value = getattr(profile, field)
        if isinstance(value, Number | Curve):
            assert any(word in value.source for word in ("measured", "/proc/meminfo")), field
    assert "not measured" in profile.step_overhead_s.source


def test_a_measured_profile_can_be_simulated(profile: Hardware) -> None:
    for method in simulated_methods():
        assert decode_step(profile, SHAPE, HybridConfig(), method, 4096, 2).tokens_per_s > 0


def test_the_profile_is_written_and_read_back_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: Hardware
) -> None:
    monkeypatch.setattr("hybrid_backend.tools.plan.hardware.measure.measure", lambda **_: profile)
    shown = io.StringIO()
    profile_hardware(tmp_path / "hw.json", console=Console(file=shown, width=200))
    assert find_hardware(tmp_path / "hw.json") == profile
    assert "cpu_attention_bytes_per_s" in shown.getvalue()
    assert [file.name for file in tmp_path.iterdir()] == ["hw.json"]


def test_a_measurement_beside_other_processes_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "beside_others", lambda measured: (measured(), 0.6))
    shown = io.StringIO()
    profile = measure(
        device="cpu", shape=SHAPE, rounds=1, memory_bytes=SIZE, console=Console(file=shown, width=200, no_color=True)
    )
    assert "warning: other processes used 60% of the CPUs' time meanwhile, so rates are low" in shown.getvalue()
    assert profile.name.endswith("measured while busy"), "hybrid plan shows the name"
    assert "beside processes that used 60%" in profile.bf16_flops_per_s.source


def test_rounds_that_differ_much_are_told_by_their_probe() -> None:
    rounds = iter([1e9, 1e9, 4e9, 1e9, 9e9, 5e9] * 2)  # the first round of six does not count
    probes = [Probe("host_read", 1, lambda: next(rounds)), Probe("cpu_attention", 1, lambda: 1e9)]
    _, spreads = _medians(probes, 5, None)
    assert spreads["cpu_attention"] == 0 and spreads["host_read"] > SPREAD
    (line,) = _doubts(spreads, busy=0.0)
    assert line.startswith("warning: half of the rounds differ by more than 50% in host_read (by ")
    assert _doubts({"host_read": 0.1}, busy=0.1) == []


def test_the_table_has_units_and_no_line_of_what_a_cpu_has_not(profile: Hardware) -> None:
    shown = io.StringIO()
    Console(file=shown, width=200).print(table(profile))
    text = shown.getvalue()
    assert "hbm" not in text and "gpus" not in text
    assert re.search(r"host_ram_bytes +│ +[\d.]+ GiB", text) and re.search(r"bf16_flops_per_s +│ +[\d.]+ GFLOP/s", text)
    assert not re.search(r": 0\.0+(?!\d)", text), "a slow rate has digits"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu"}, "expected auto, cuda or cpu"),
        ({"cores": 100_000}, "cores: got 100000"),
        ({"cores": 0}, "cores: got 0"),
        ({"memory_bytes": 1 << 50}, "MiB free"),
        ({"memory_bytes": 1 << 20}, "at least"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_runs(options: dict[str, int | str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure(shape=SHAPE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("out", [".", "no/such/folder/hw.json"])
def test_an_unwritable_target_is_told_before_anything_runs(tmp_path: Path, out: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        profile_hardware(tmp_path / out)
