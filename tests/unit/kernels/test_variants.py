"""The choice among kernels that compute the same operation: by CPU model, by measurement, by force."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch

from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels import byte_digests, codes, cpu, oracle
from hybrid_backend.kernels.cpu import library, measured_orders, operations
from hybrid_backend.kernels.cpu.measured_orders import (
    BUSY,
    MeasuredOrders,
    Orders,
    keep_orders,
    measure_orders,
    read_orders,
)
from hybrid_backend.kernels.cpu.variants import (
    Case,
    CpuModel,
    choose,
    fastest_order,
    forced_variants,
    known_order,
    microarchitecture,
    this_cpu,
)
from tests.support import cases
from tests.unit.kernels.test_cpu_prompts import TOLERANCE, expected, prompt

native = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))
VARIANTS = library.library_variants().running_anywhere() if cpu.available() else {}

ALL = ["amx", "avx512_bf16", "avx512", "avx2", "generic"]
PROMPT = Case("prompt", "bfloat16", 64, 4)
ZEN4, ZEN5 = CpuModel("AuthenticAMD", 0x19, 0x11), CpuModel("AuthenticAMD", 0x1A, 0x02)
SAPPHIRE_RAPIDS, EMERALD_RAPIDS = CpuModel("GenuineIntel", 6, 0x8F), CpuModel("GenuineIntel", 6, 0xCF)
NOBODY_KNOWS = CpuModel("GenuineIntel", 6, 0xFF)


@pytest.mark.parametrize("cpu_model", [SAPPHIRE_RAPIDS, EMERALD_RAPIDS])
def test_an_intel_cpu_attends_bf16_prompts_with_amx_or_else_in_fp32(cpu_model: CpuModel) -> None:
    with_tiles, without = known_order(cpu_model, PROMPT, ALL), known_order(cpu_model, PROMPT, ALL[1:])
    assert with_tiles is not None and with_tiles[0] == "amx"
    assert without is not None and without[0] == "avx512"


@pytest.mark.parametrize("cpu_model", [ZEN4, ZEN5])
def test_an_amd_cpu_attends_bf16_prompts_in_pairs(cpu_model: CpuModel) -> None:
    order = known_order(cpu_model, PROMPT, ALL[1:])
    assert order is not None and order[0] == "avx512_bf16"


def test_a_cpu_that_nobody_measured_has_no_known_order() -> None:
    assert known_order(NOBODY_KNOWS, PROMPT, ALL) is None
    assert not microarchitecture(NOBODY_KNOWS)


@pytest.mark.parametrize(
    ("seconds", "order"),
    [
        ({"bf16": 225.0, "avx512": 159.0, "avx2": 170.0}, ("avx512", "avx2", "bf16")),
        ({"bf16": 97.0, "avx512": 168.0, "avx2": 177.0}, ("bf16", "avx512", "avx2")),
        ({"vnni": 109.0, "avx2": 100.0}, ("vnni", "avx2")),
        ({"vnni": 111.0, "avx2": 100.0}, ("avx2", "vnni")),
        ({"a": 1.2, "b": 1.09, "c": 1.0}, ("b", "c", "a")),
    ],
)
def test_a_variant_goes_ahead_if_it_is_clearly_faster(seconds: dict[str, float], order: tuple[str, ...]) -> None:
    assert fastest_order(seconds) == order


def test_the_cpu_s_model_is_read_from_linux(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    first = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Xeon: x\n"
    cpuinfo.write_text(f"{first}\nprocessor\t: 1\nvendor_id\t: other\n")
    assert this_cpu(cpuinfo) == EMERALD_RAPIDS
    arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0xd40\n"
    cpuinfo.write_text(arm)
    assert this_cpu(cpuinfo) == CpuModel("0x41", 8, 0xD40)
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: none\n")
    assert this_cpu(cpuinfo) == this_cpu(tmp_path / "absent") == CpuModel("", 0, 0)


# --- measurements ---


CASE = "bytes bfloat16 64x2"
RUNNING = {CASE: ["vnni", "avx2"]}
AVX2_FIRST: Orders = {CASE: ("avx2", "vnni")}
VNNI_FIRST: Orders = {CASE: ("vnni", "avx2")}


def test_a_measurement_is_kept_and_the_first_of_two_processes_decides(tmp_path: Path) -> None:
    path = tmp_path / "new" / "orders.json"
    earlier, later = MeasuredOrders(AVX2_FIRST, 0.0), MeasuredOrders(VNNI_FIRST, 0.0)
    assert keep_orders(path, earlier, RUNNING) == AVX2_FIRST
    assert keep_orders(path, later, RUNNING) == AVX2_FIRST
    assert read_orders(path, RUNNING) == earlier
    assert list(path.parent.iterdir()) == [path]


def test_a_measurement_of_a_busy_machine_gives_way_to_one_of_a_quiet_machine_only(tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    busy, busier, quiet = (MeasuredOrders(AVX2_FIRST, 0.5), MeasuredOrders(VNNI_FIRST, 0.9),
                           MeasuredOrders(VNNI_FIRST, BUSY))  # fmt: skip
    assert keep_orders(path, busy, RUNNING) == AVX2_FIRST
    assert keep_orders(path, busier, RUNNING) == AVX2_FIRST, "servers on a busy machine choose alike"
    assert keep_orders(path, quiet, RUNNING) == VNNI_FIRST
    assert keep_orders(path, busy, RUNNING) == VNNI_FIRST and read_orders(path, RUNNING) == quiet


def test_the_time_of_other_processes_during_a_measurement_is_counted_and_its_own_time_is_not(tmp_path: Path) -> None:
    stat, cpus, tick = tmp_path / "stat", os.cpu_count() or 1, os.sysconf("SC_CLK_TCK")

    def write(busy_seconds: float) -> None:
        stat.write_text(f"cpu  {round(busy_seconds * tick)} 0 0 9999 0 0 0 0 0 0\ncpu0 1 2 3\n")

    def measure(others_share: float) -> Orders:
        start, own = time.monotonic(), time.process_time()
        while time.process_time() - own < 0.2:
            pass
        write(100 + time.process_time() - own + others_share * cpus * (time.monotonic() - start))
        return AVX2_FIRST

    for share in (0.0, 0.5):
        write(100)
        measured = measure_orders(partial(measure, share), stat)
        assert measured.orders == AVX2_FIRST and measured.busy_share == pytest.approx(share, abs=0.1)
    assert measure_orders(lambda: AVX2_FIRST, tmp_path / "absent") == MeasuredOrders(AVX2_FIRST, 0.0)


@pytest.mark.parametrize(
    "damaged",
    [
        *("", "[1]", "{", "null", '{"orders": 1}', '{"orders": {}, "busy_share": 0}', "\0", "[" * 100_000),
        '{"orders": {"bytes bfloat16 64x2": 7}, "busy_share": 0}',
        '{"orders": {"bytes bfloat16 64x2": ["vnni"]}, "busy_share": 0}',
        '{"orders": {"bytes bfloat16 64x2": ["vnni", 1]}, "busy_share": 0}',
        '{"orders": {"bytes bfloat16 64x2": ["vnni", "avx2"]}}',
        '{"orders": {"bytes bfloat16 64x2": ["vnni", "avx2"]}, "busy_share": "much"}',
    ],
)
def test_a_damaged_measurement_is_made_again(tmp_path: Path, damaged: str) -> None:
    path, measured = tmp_path / "orders.json", MeasuredOrders(AVX2_FIRST, 0.9)
    path.write_text(damaged)
    assert read_orders(path, RUNNING) is None
    assert keep_orders(path, measured, RUNNING) == AVX2_FIRST
    assert read_orders(path, RUNNING) == measured


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert keep_orders(tmp_path / "file" / "orders.json", MeasuredOrders(AVX2_FIRST, 0.0), RUNNING) == AVX2_FIRST


@native
def test_an_unknown_cpu_is_measured_once_and_chooses_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_orders, "BUSY", 1.0)  # The machine is quiet, whatever else runs here.

    def start(_: int = 0) -> list[object]:
        return [*choose(library.library_variants(), NOBODY_KNOWS, "", library.LIBRARY, tmp_path)]

    with ThreadPool(2) as starts:
        first, second = starts.map(start, range(2))
    assert first == second == start()
    assert len(list(tmp_path.iterdir())) == 1
    assert {choice.case for choice in first} == set(library.library_variants().cases())


# --- force ---


def test_variants_are_forced_by_name() -> None:
    machine = {"prompt": ["avx512", "avx2"], "codes": ["vbmi"]}
    assert forced_variants(" prompt=avx2, codes=vbmi,", machine) == {"prompt": "avx2", "codes": "vbmi"}
    for value in ("prompts=avx2", "avx2", "prompt=amx", "prompt=", "=avx2", "prompt=avx2;codes=vbmi"):
        with pytest.raises(ConfigError, match="HYBRID_KERNELS: ") as refused:
            forced_variants(value, machine)
        assert "\n" not in str(refused.value)


@native
def test_a_forced_variant_is_tried_first_wherever_it_has_the_shape(tmp_path: Path) -> None:
    variants = library.library_variants()
    forced = VARIANTS["prompt"][0]
    for choice in choose(variants, NOBODY_KNOWS, f"prompt={forced}", library.LIBRARY, tmp_path):
        is_forced = choice.case.operation == "prompt" and forced in variants.running(choice.case)
        if is_forced and len(choice.order) > 1:
            assert (choice.order[0], choice.reason) == (forced, "forced")
        assert is_forced or choice.reason != "forced"


@native
def test_a_process_does_not_start_with_a_wrong_name_in_the_environment() -> None:
    code = "from hybrid_backend.kernels.cpu import available; available()"
    environment = {**os.environ, "HYBRID_KERNELS": "prompt=quick"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode
    assert "HYBRID_KERNELS: 'prompt=quick': this machine's variants of prompt are" in run.stderr.splitlines()[-1]


# --- every variant computes its operation ---


@contextmanager
def first_of(operation: str, variant: str) -> Iterator[None]:
    """Have the library take a variant wherever it has the shape."""
    variants = library.library_variants()
    for case in variants.cases():
        if case.operation == operation:
            variants.take(case, [variant])
    try:
        yield
    finally:
        for choice in library.kernel_choices():
            variants.take(choice.case, choice.order)


@native
@pytest.mark.parametrize("variant", VARIANTS.get("prompt", []))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 256, 512])
def test_every_variant_attends_prompts(variant: str, dtype: torch.dtype, dim: int) -> None:
    q, kv, pages, out = prompt(dtype, 6, 2, dim, 150, 400)
    with first_of("prompt", variant):
        cpu.attend_prompt(q, kv, pages, 400, dim**-0.5, None, None, out)
    assert cases.relative_error(out, expected(q, kv, pages, 400)) <= TOLERANCE[dtype]


@native
@pytest.mark.parametrize(
    ("operation", "variant"),
    [(operation, variant) for operation in ("digests", "bytes", "codes") for variant in VARIANTS.get(operation, [])],
)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 80), (8, 128), (4, 512)])
def test_every_variant_scores_pages(operation: str, variant: str, group: int, dim: int) -> None:
    rng = torch.Generator().manual_seed(0)
    pages, kv_heads, tokens = 41, 2, 32
    keys = torch.randn(pages, kv_heads, tokens, dim, generator=rng) + torch.randn(kv_heads, 1, dim, generator=rng)
    q = torch.randn(2, kv_heads * group, dim, generator=rng)
    extremes = torch.stack([keys.amax(2), keys.amin(2)], 2)
    made = {"digests": extremes, "bytes": byte_digests.encode(extremes), "codes": codes.encode(keys)}[operation]
    table = torch.stack([torch.randperm(pages, generator=rng) for _ in q]).int()
    count, budgets = torch.full((2,), pages, dtype=torch.int32), torch.full((2,), 4, dtype=torch.int32)
    arguments = (q, made, table, count, budgets, "max", True, 0.5, dim**-0.5, tokens)
    with first_of(operation, variant):
        scores = operations.page_scores(*arguments)
    assert cases.relative_error(scores, oracle.page_scores(*arguments)) <= (1e-5 if operation == "digests" else 0.02)


@native
@pytest.mark.parametrize("variant", VARIANTS.get("shares", []))
def test_every_variant_computes_shares(variant: str) -> None:
    rng = torch.Generator().manual_seed(0)
    digests = torch.randn(61, 2, 2, 64, generator=rng)
    q, table = torch.randn(1, 6, 64, generator=rng), torch.arange(61, dtype=torch.int32)[None]
    count, budgets = torch.tensor([61], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    arguments = (q, digests, table, count, budgets, "softmax", False, 0.5, 0.125)
    with first_of("shares", variant):
        scores = operations.page_scores(*arguments)
    assert cases.relative_error(scores, oracle.page_scores(*arguments)) <= 1e-5


@native
@pytest.mark.parametrize("variant", VARIANTS.get("weights", []))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_every_variant_averages_weights(variant: str, dtype: torch.dtype, group: int) -> None:
    rng = torch.Generator().manual_seed(0)
    kv = torch.randn(5, 2, 2, 16, 64, generator=rng).to(dtype)
    q, ids = torch.randn(1, 2 * group, 64, generator=rng).to(dtype), torch.tensor([[[3, 0, 4]]], dtype=torch.int32)
    tokens, lse = torch.tensor([[43]], dtype=torch.int32), torch.full((1, 2 * group), 4.0)
    averages = torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)
    places = torch.tensor([[[0, 1, 2]]], dtype=torch.int32)
    with first_of("weights", variant):
        operations.page_weights(q, kv, ids, places, tokens, lse, averages[0], 0.125, 0.5, False)
    oracle.page_weights(q, kv, ids, places, tokens, lse, averages[1], 0.125, 0.5, False)
    assert cases.relative_error(*averages) <= 1e-4
