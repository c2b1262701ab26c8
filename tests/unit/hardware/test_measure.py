"""`hybrid profile --hardware` on this machine, for real and short."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Curve, Hardware, Number, find_hardware
from hybrid_backend.kernels import cpu
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.hardware.measure import measure, profile_hardware
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
