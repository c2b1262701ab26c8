"""The whole plan: what fits, how much more, how fast, and what a user sees of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_backend.config import HybridConfig, config_from_mapping, parse_size
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import find_hardware
from hybrid_backend.memory_plan.footprint import UTILIZATION
from hybrid_backend.methods import method_names
from hybrid_backend.model import ModelShape
from hybrid_backend.model_layers import KvHeads
from hybrid_backend.tools.plan.report import Plan, Request, Row, make_plan, serve_flags
from tests.support.plan_command import run

GIB = 2**30
LLAMA = ModelShape(
    name="llama-3.1-8b", layers=32, heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336, vocab=128256,
    dtype="bfloat16", tied=False, weight_bytes=16_060_522_496, windows=(None,) * 32, max_context=131072,
)  # fmt: skip
CONFIG: HybridConfig = config_from_mapping({"budget_tokens": 2048, "page_size": 32}, "test")


def request(**changes: Any) -> Request:
    start = Request(shape=LLAMA, config=CONFIG, context=32768, batch=16, gpu_mem=None, ram=None)
    return replace(start, **{"hardware": find_hardware("a100-80"), **changes})


@pytest.fixture(scope="module")
def planned() -> Plan:
    return make_plan(request())


def test_every_method_has_a_row_beside_stock(planned: Plan) -> None:
    """Only `quest`, which no GPU runs, has none, unless it is configured."""
    gpu_methods = [name for name in method_names() if name != "quest"]
    assert [row.name for row in planned.rows] == ["stock", *gpu_methods]
    assert all(row.refused is None for row in planned.rows)
    configured = make_plan(request(config=CONFIG.model_copy(update={"method": "quest"}))).row("quest")
    assert configured.refused is not None and "not on a GPU; write method: scout" in configured.refused


def test_a_cpu_has_rows_of_the_methods_that_serve_there_unless_all_are_asked_for() -> None:
    """The others copy pages within RAM there, which serves tests."""
    on_cpu = request(hardware=None, gpu_mem=0, ram=256 * GIB)
    planned = make_plan(on_cpu)
    assert [row.name for row in planned.rows] == ["stock", "dense", "quest"] and planned.configured == "quest"
    everything = make_plan(replace(on_cpu, all_methods=True))
    assert [row.name for row in everything.rows] == ["stock", *method_names()]
    assert all(row.refused is None for row in everything.rows)
    asked = make_plan(replace(on_cpu, methods=("clo",)))
    assert [row.name for row in asked.rows] == ["stock", "clo"]
    configured = make_plan(replace(on_cpu, config=CONFIG.model_copy(update={"method": "hgca"})))
    assert [row.name for row in configured.rows] == ["stock", "dense", "hgca", "quest"]


def test_a_shape_without_native_kernels_is_refused_for_quest_and_planned_with_scout() -> None:
    odd = replace(LLAMA, heads=30, kv_heads=3, head_dim=40)
    planned = make_plan(request(shape=odd, hardware=None, gpu_mem=0, ram=256 * GIB))
    assert planned.configured == "scout" and planned.row("scout").refused is None
    assert "needs the native CPU kernels" in str(planned.row("quest").refused)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_heads": KvHeads(16, 128)}, "windows of another shape than full attention, which is not supported on"),
        ({"has_chunks": True}, "attention in chunks, which is not supported on a GPU: plan for a CPU"),
    ],
    ids=["gemma 4", "llama 4"],
)
def test_what_a_gpu_refuses_is_planned_for_a_cpu_only(change: dict[str, Any], message: str) -> None:
    shape = replace(LLAMA, windows=(1024, None) * 16, **change)
    with pytest.raises(ConfigError, match=message):
        make_plan(request(shape=shape))
    on_cpu = make_plan(request(shape=shape, hardware=None, gpu_mem=0, ram=256 * GIB))
    assert all(row.refused is None for row in on_cpu.rows)


def fits(row: Row, **changes: Any) -> bool:
    only = () if row.name == "stock" else (row.name,)
    return make_plan(request(methods=only, **changes)).row(row.name).fits


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not(planned: Plan) -> None:
    for row in planned.rows:
        assert fits(row, batch=row.max_batch)
        assert not fits(row, batch=row.max_batch + 1)


@pytest.mark.slow
def test_the_largest_context_fits_and_one_token_more_does_not(planned: Plan) -> None:
    for row in planned.rows:
        assert fits(row, context=row.max_context)
        assert not fits(row, context=row.max_context + 1)


def test_stock_by_hand(planned: Plan) -> None:
    """8B weights, 128 KiB of KV per token; the rest of 92 % of 80 GiB is pages of 32 tokens."""
    stock = planned.row("stock")
    taken = sum(item.bytes for item in stock.items if item.place == "device" and item.name != "KV cache")
    left = 80 * GIB * UTILIZATION - taken
    blocks = int(left // (32 * 131072)) - 1
    assert abs(stock.max_batch - blocks // 1024) <= 1  # logits grow with the batch
    assert stock.items[0].bytes == 16_060_522_496


def test_offload_serves_more_than_stock_and_is_bounded_by_the_host(planned: Plan) -> None:
    scout, stock = planned.row("scout"), planned.row("stock")
    assert scout.max_batch > 2 * stock.max_batch
    assert scout.max_context > 2 * stock.max_context
    less = make_plan(request(ram=128 * GIB)).row("scout")
    assert 0 < less.max_batch < scout.max_batch
    assert make_plan(request(batch=less.max_batch + 1, ram=128 * GIB)).row("scout").why_not is not None


def test_memory_adds_up(planned: Plan) -> None:
    for row in planned.rows:
        assert row.device_bytes == sum(item.bytes for item in row.items if item.place == "device")
        assert row.host_bytes == sum(item.bytes for item in row.items if item.place == "host")
        assert row.fits == (row.device_bytes <= planned.device_limit and row.host_bytes <= planned.host_limit)


def test_times_are_told_only_of_what_fits() -> None:
    plan_ = make_plan(request(batch=64))
    stock, scout = plan_.row("stock"), plan_.row("scout")
    assert not stock.fits
    assert stock.step_ms is None
    assert stock.tokens_per_s is None
    assert stock.best_tokens_per_s is not None
    assert scout.fits
    assert scout.step_ms is not None
    assert scout.tokens_per_s == pytest.approx(64 / scout.step_ms * 1e3)


def test_without_a_machine_there_is_memory_and_no_time() -> None:
    row = make_plan(request(hardware=None, gpu_mem=80 * GIB, ram=512 * GIB)).row("scout")
    assert row.fits
    assert row.step_ms is None
    assert row.tokens_per_s is None


def test_no_device_means_that_all_of_it_is_host_memory() -> None:
    plan_ = make_plan(request(hardware=None, gpu_mem=0, ram=256 * GIB, batch=4))
    assert all(row.device_bytes == 0 for row in plan_.rows)
    assert plan_.row("stock").host_bytes > 16 * GIB + 16 * GIB  # weights, and 4 x 32k tokens of KV


def test_a_method_that_the_configuration_rules_out_is_refused_with_its_reason() -> None:
    per_head = config_from_mapping({"selection": {"granularity": "kv_head"}}, "test")
    row = make_plan(request(config=per_head)).row("infinigen")
    assert row.refused is not None
    assert "write layer" in row.refused
    assert make_plan(request(config=per_head)).row("hgca").refused is None


def test_eight_devices_share_the_host() -> None:
    one = make_plan(request())
    eight = make_plan(request(hardware=find_hardware("a100-80").replace(gpus=8), batch=128))
    assert eight.devices == 8
    assert eight.host_limit == one.host_limit // 8
    assert eight.row("stock").max_batch == 8 * one.row("stock").max_batch
    assert eight.row("scout").device_bytes == one.row("scout").device_bytes  # 16 sequences on each
    assert eight.row("scout").max_batch < 8 * one.row("scout").max_batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "--context: got 0"),
        ({"batch": -1}, "--batch: got -1"),
        ({"hardware": None, "ram": GIB}, "--gpu-mem: is missing"),
        ({"hardware": None, "gpu_mem": GIB}, "--ram: is missing"),
        ({"methods": ("scoot",)}, "unknown method 'scoot'"),
    ],
)
def test_a_wrong_request_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(request(**changes))


def test_flags_ask_for_the_pages_that_were_planned(planned: Plan) -> None:
    row = planned.row("scout")
    flags = serve_flags(row, planned)
    size = next(flag for flag in flags if "host_pool" in flag).rpartition("=")[2]
    assert parse_size(size) // planned.block_bytes == row.pages == 16 * 1024 + 1
    assert size == "65540MiB", "readable, and to the block"
    assert flags[flags.index("--max-num-seqs") + 1] == "16"


def test_the_plan_says_which_contexts_are_exact(model_dir: Path) -> None:
    rows = make_plan(request(methods=("scout", "dense"))).rows
    assert [row.exact_tokens for row in rows] == [None, CONFIG.automatic_frames * 32, None]
    assert make_plan(request(hardware=None, gpu_mem=0, ram=256 * GIB)).row("quest").exact_tokens == 2048
    told = " ".join(run("--machine", "epyc-7313", "--context", "8k").output.split())
    assert "- quest: exact up to 2,048 tokens of context; beyond that decoding leaves pages out" in told
    on_gpu = " ".join(run("--machine", "a10", "--context", "8k").output.split())
    assert "- scout: exact up to at least 2," in on_gpu
    short = " ".join(run("--machine", "epyc-7313", "--context", "1k").output.split())
    assert "- quest: exact, as no sequence is longer than 2,048 tokens" in short
    assert "exact" not in run("--machine", "epyc-7313", "--set", "sparse=never").output.partition("\n- ")[2]


def test_of_several_reasons_the_configured_methods_own_is_told() -> None:
    selection = {"digest": "minmax_int8", "aggregate": "max"}
    keys = {"method": "quest", "quality": {"min_mass": 0.9}, "selection": selection}
    with pytest.raises(ConfigError, match=r"selection.digest: minmax_int8 needs"):
        make_plan(
            request(
                config=config_from_mapping(keys, "test"), gpu_mem=0, ram=64 * GIB, methods=("infinigen", "quest", "clo")
            )
        )


def test_a_promise_on_a_gpu_is_planned_with_room_for_lists_of_all_pages() -> None:
    """A row may come to attend all of them."""
    promised = make_plan(request(config=config_from_mapping({"quality": {"min_mass": 0.9}}, "test"))).row("scout")
    plain = make_plan(request()).row("scout")
    assert promised.refused is None and promised.fits
    found, before = (next(item.bytes for item in row.items if item.name == "method, host") for row in (promised, plain))
    pages, rows, layers = 32768 // 32, 16, LLAMA.layers - len(CONFIG.exact_layers)
    lists = rows + 1  # of a layer: in its mailbox those of all rows, in its sample one
    assert found - before == layers * lists * 4 * (pages - CONFIG.automatic_frames)
