"""The hardware profile: JSON there and back, curves, named machines, and what a user reads when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Curve, Hardware, Number, find_hardware, machine_names
from hybrid_backend.hardware.spec import copies, hardware_from_json, saturating

rates = st.floats(1e3, 1e13)
curves = st.lists(st.tuples(st.floats(1, 1e9), rates), min_size=1, max_size=6, unique_by=lambda p: p[0]).map(
    lambda points: Curve(points=tuple(sorted(points)), source="drawn")
)
numbers = st.floats(0, 1e15).map(lambda value: Number(value=value, source="drawn"))
divisors = {"hbm_bytes_per_s", "hbm_efficiency", "bf16_flops_per_s", "flops_efficiency"}  # above zero
profiles = st.builds(
    Hardware,
    name=st.text(min_size=1),
    device=st.sampled_from(["gpu", "cpu"]),
    **{
        name: numbers.filter(lambda number: number.value > 0) if name in divisors else numbers
        for name, field in Hardware.model_fields.items()
        if field.annotation is Number
    },
    linear_bytes_per_s=st.none() | curves,
    device_attention_bytes_per_s=st.none() | curves,
    stock_attention_bytes_per_s=st.none() | curves,
    host_device_bytes_per_s=curves,
    host_read_bytes_per_s=curves,
    cpu_attention_bytes_per_s=curves,
    cores=st.integers(1, 512),
    gpus=st.integers(1, 16),
)


@given(profiles)
def test_a_profile_survives_json(profile: Hardware) -> None:
    assert hardware_from_json(profile.to_json(), "file") == profile


@given(curves, st.floats(0.1, 1e10))
def test_a_curve_stays_between_its_points_and_meets_them(curve: Curve, x: float) -> None:
    low, high = min(y for _, y in curve.points), max(y for _, y in curve.points)
    assert low * (1 - 1e-9) <= curve.at(x) <= high * (1 + 1e-9)
    assert all(curve.at(at) == rate for at, rate in curve.points)
    assert curve.best_until(x) >= curve.at(x)


@given(curves, st.floats(0.1, 1e10), st.floats(0.1, 1e10))
def test_more_threads_are_never_worse_because_fewer_may_be_used(curve: Curve, a: float, b: float) -> None:
    assert curve.best_until(min(a, b)) <= curve.best_until(max(a, b))


def test_small_pieces_are_slower_and_large_ones_reach_the_link() -> None:
    curve = copies(25e9, 2e-6, "test")
    assert [curve.at(2**n) for n in range(12, 27)] == sorted(curve.at(2**n) for n in range(12, 27))
    assert curve.at(50_000) == pytest.approx(50_000 / (2e-6 + 50_000 / 25e9), rel=0.05)
    assert curve.at(1 << 30) == pytest.approx(25e9, rel=0.01)


def test_threads_fill_the_memory_and_no_more() -> None:
    curve = saturating([1, 2, 8], 12e9, 40e9, "test")
    assert curve.at(1) == 12e9
    assert curve.at(2) == 24e9
    assert curve.at(8) == curve.at(64) == 40e9


@pytest.mark.parametrize("name", machine_names())
def test_a_named_machine_has_a_source_for_every_number(name: str) -> None:
    machine = find_hardware(name)
    for field in Hardware.model_fields:
        value = getattr(machine, field)
        if isinstance(value, Number | Curve):
            assert len(value.source) > 10, field
    assert machine.cpu_attention_achieved < machine.host_read_achieved <= machine.hbm_achieved
    assert machine.link_achieved(2**24) < machine.hbm_achieved


def test_the_named_machines_are_those_that_were_promised() -> None:
    """Memory and peak bandwidth as on the data sheets, in GiB and GB/s."""
    sheet = {"t4": (15, 320), "a10": (22, 600), "a40": (45, 696), "l40s": (45, 864), "rtx4090": (24, 1008),
             "a100-40": (40, 1555), "a100-80": (80, 1935), "h100": (80, 3350), "h200": (140, 4800),
             "ryzen-7950x": (64, 83.2), "epyc-7313": (256, 204.8), "epyc-9354": (384, 460.8),
             "xeon-6426y": (256, 307.2), "xeon-8480": (256, 307.2)}  # fmt: skip
    found = {
        name: (
            round(find_hardware(name).device_memory_bytes.value / 2**30),
            find_hardware(name).hbm_bytes_per_s.value / 1e9,
        )
        for name in machine_names()
    }
    assert found == sheet


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "h100"),
        ("A100", "a100-80"),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("EPYC 7313", "epyc-7313"),
        ("Xeon 8480+", "xeon-8480"),
    ],
)
def test_machines_are_found_as_people_write_them(text: str, name: str) -> None:
    assert find_hardware(text).name == name


def test_a_file_is_found_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(find_hardware("t4").to_json())
    assert find_hardware(file) == find_hardware("t4")


def changed(**changes: Any) -> str:
    data = json.loads(find_hardware("t4").to_json())
    for key, value in changes.items():
        if value is None:
            del data[key]
        else:
            data[key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "got list"),
        (changed(cores=None), "cores: missing"),
        (changed(cores=0), "cores: got 0"),
        (changed(colour="red"), "colour: unknown key"),
        (changed(hbm_bytes_per_s={"value": -1, "source": "x"}), "hbm_bytes_per_s.value: got -1"),
        (changed(hbm_bytes_per_s={"value": 1}), "hbm_bytes_per_s.source: missing"),
        (changed(host_read_bytes_per_s={"points": [[2, 1], [1, 1]], "source": "x"}), "must rise"),
        (changed(host_read_bytes_per_s={"points": [], "source": "x"}), "host_read_bytes_per_s.points"),
        (changed(device="tpu"), "device: got 'tpu'"),
        (changed(hbm_bytes_per_s={"value": "fast", "source": ""}, cores=0), "more problem"),
    ],
)  # fmt: skip
def test_a_broken_profile_is_told_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        find_hardware(str(file))
    assert words in str(error.value)
    assert "broken.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_machine_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'b300': no such machine; write one of t4, a10"):
        find_hardware("b300")


@pytest.mark.parametrize("path", ["missing.json", "./nothing", ""])
def test_a_missing_file_is_told(path: str) -> None:
    with pytest.raises(ConfigError, match="no such"):
        find_hardware(path)


def test_a_profile_cannot_be_changed_and_a_changed_copy_is_checked() -> None:
    machine = find_hardware("t4")
    with pytest.raises(ValidationError):
        machine.cores = 3  # type: ignore[misc]
    assert machine.replace(cores=3).cores == 3
    with pytest.raises(ValidationError):
        machine.replace(cores=0)


def test_devices_share_cores_and_memory_of_their_host() -> None:
    one = find_hardware("h100")
    eight = one.replace(gpus=8)
    assert eight.threads == one.cores // 8
    assert eight.cpu_attention_achieved * 8 <= one.cpu_attention_achieved * 1.0001
    assert eight.host_read_achieved * 8 == pytest.approx(one.host_read_achieved)


def test_more_cores_continue_the_curves_and_a_flat_one_stays_flat() -> None:
    a100 = find_hardware("a100")
    assert a100.with_cores(128).host_read_achieved == a100.host_read_achieved
    assert a100.with_cores(4).host_read_achieved == 4 * 12e9 and a100.with_cores(4).cores == 4
    measured = Curve(points=((1, 20e9), (2, 40e9)), source="test")
    two = a100.replace(cores=2, host_read_bytes_per_s=measured)
    assert two.with_cores(4).host_read_achieved == 80e9
    assert "continued to 4" in two.with_cores(4).host_read_bytes_per_s.source


@pytest.mark.parametrize("name", machine_names("cpu"))
def test_the_cores_of_a_cpu_server_are_its_device(name: str) -> None:
    """With fewer of them weights are read and products are made more slowly; more do not exceed the memory channels."""
    whole = find_hardware(name)
    few, many = whole.with_cores(2), whole.with_cores(256)
    assert few.hbm_achieved == pytest.approx(2 * 12e9) == few.host_read_achieved
    assert few.flops_achieved == pytest.approx(whole.flops_achieved * 2 / whole.cores)
    assert few.device_attention_bytes_per_s is not None and whole.device_attention_bytes_per_s is not None
    assert few.device_attention_bytes_per_s.at(1) == pytest.approx(few.cpu_attention_achieved)
    assert whole.device_attention_bytes_per_s.at(1) == pytest.approx(whole.cpu_attention_achieved)
    assert many.hbm_achieved == pytest.approx(many.host_read_achieved) and many.hbm_efficiency.value <= 0.81
    assert "2 of " in few.hbm_efficiency.source


def test_the_cores_of_a_gpus_host_leave_the_gpu_as_it_is() -> None:
    assert find_hardware("h100").with_cores(4).hbm_achieved == find_hardware("h100").hbm_achieved
