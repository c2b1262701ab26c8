"""Properties of every simulated step, and steps that can be computed by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Curve, Hardware, find_hardware, machine_names
from hybrid_backend.hardware.machines import PCIE_EFFICIENCY, PCIE_PEAK
from hybrid_backend.hardware.spec import copies
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate import PARTS, StepTime, decode_step, simulated_methods
from hybrid_backend.tools.plan.simulate.costs import (
    CODE_RATE,
    DIGEST_RATE,
    ENGINE_LAUNCHES,
    GAP_SECONDS,
    KERNEL_SECONDS,
    LAUNCHES,
    Costs,
)

WINDOWS: tuple[int | None, ...] = (1024, None) * 4
SHAPE = ModelShape("m", 8, 32, 8, 128, 4096, 14336, 128256, "bfloat16", False, 0, (None,) * 8)
WINDOWED = ModelShape("w", 8, 32, 8, 128, 4096, 14336, 128256, "bfloat16", False, 0, WINDOWS)
CONFIG = HybridConfig()
A100 = find_hardware("a100")
ON_CPU = find_hardware("h100").replace(device="cpu")

machines = st.sampled_from(machine_names()).map(find_hardware)
methods = st.sampled_from(simulated_methods())
contexts = st.integers(1, 1 << 20)
batches = st.integers(1, 128)
shares = st.floats(0, 0.9)
configs = st.builds(
    lambda exact, interval, query, budget, ahead, recall: HybridConfig.model_validate(
        {
            "exact_layers": exact,
            "recall": {"intervals": interval, "enabled": recall},
            "lookahead": {"partial_query": query, "enabled": ahead},
            "budget_tokens": budget,
        }
    ),
    st.sampled_from([(), (0,), (0, 3)]),
    st.integers(1, 12),
    st.sampled_from(["predicted", "real"]),
    st.sampled_from([512, 2048, 4096]),
    st.booleans(),
    st.booleans(),
)
few = settings(max_examples=40)


def linked(machine: Hardware, pcie: int) -> Hardware:
    """The machine with a link of that generation."""
    return machine.replace(host_device_bytes_per_s=copies(PCIE_EFFICIENCY * PCIE_PEAK[pcie], 1.5e-6, "test"))


def twice(curve: Curve) -> Curve:
    return Curve(points=tuple((x, 2 * rate) for x, rate in curve.points), source="test")


def keys(**settings_: Any) -> HybridConfig:
    return HybridConfig.model_validate(settings_)


@few
@given(machines, methods, configs, contexts, batches, shares, st.sampled_from([SHAPE, WINDOWED]))
def test_the_parts_are_the_step_and_no_resource_works_longer_than_it_lasts(
    machine: Hardware, method: str, config: HybridConfig, context: int, batch: int, share: float, shape: ModelShape
) -> None:
    step = decode_step(machine, shape, config, method, context, batch, cpu_share=share)
    assert set(step.part_seconds) <= set(PARTS) and all(seconds >= 0 for seconds in step.part_seconds.values())
    assert step.seconds == pytest.approx(sum(step.part_seconds.values()))
    assert step.part_seconds["engine"] == machine.step_overhead_s.value
    assert step.pcie_bytes / machine.link_achieved(math.inf) <= step.seconds * (1 + 1e-9)
    assert step.cpu_bytes / machine.cpu_attention_achieved <= step.seconds * (1 + 1e-9)


@few
@given(machines, methods, configs, contexts, batches, shares, st.integers(1, 64), st.integers(1, 64))
def test_more_cores_are_never_slower(
    machine: Hardware, method: str, config: HybridConfig, context: int, batch: int, share: float, a: int, b: int
) -> None:
    fewer, more = (
        decode_step(machine.with_cores(n), SHAPE, config, method, context, batch, cpu_share=share)
        for n in sorted((a, b))
    )
    assert more.seconds <= fewer.seconds * (1 + 1e-9)


@few
@given(machines, methods, configs, contexts, batches, shares)
def test_a_faster_link_is_never_slower(
    machine: Hardware, method: str, config: HybridConfig, context: int, batch: int, share: float
) -> None:
    times = [
        decode_step(linked(machine, pcie), SHAPE, config, method, context, batch, cpu_share=share).seconds
        for pcie in (3, 4, 5, 6)
    ]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))


@few
@given(machines, methods, contexts, contexts, batches)
def test_a_longer_context_never_takes_less_time_among_the_dense_or_among_the_sparse(
    machine: Hardware, method: str, a: int, b: int, batch: int
) -> None:
    if method in ("scout", "infinigen", "clo"):
        a, b = max(a, 2177), max(b, 2177)
    short, long = (decode_step(machine, SHAPE, CONFIG, method, n, batch) for n in sorted((a, b)))
    assert long.seconds >= short.seconds * (1 - 1e-9)


@few
@given(machines, methods, contexts, batches, batches)
def test_a_larger_batch_never_takes_less_time(machine: Hardware, method: str, context: int, a: int, b: int) -> None:
    small, large = (decode_step(machine, SHAPE, CONFIG, method, context, n) for n in sorted((a, b)))
    assert large.seconds >= small.seconds * (1 - 1e-9)


@few
@given(machines, contexts, batches, shares, shares)
def test_more_on_the_cpu_moves_more_bytes_there(
    machine: Hardware, context: int, batch: int, a: float, b: float
) -> None:
    little, much = (decode_step(machine, SHAPE, CONFIG, "scout", context, batch, cpu_share=x) for x in sorted((a, b)))
    assert much.cpu_bytes >= little.cpu_bytes


def test_the_lookahead_hides_the_cpu_behind_the_layer_before() -> None:
    ahead, late = (
        decode_step(A100, SHAPE, keys(lookahead={"enabled": on}), "scout", 50_000, 16, cpu_share=0.15)
        for on in (True, False)
    )
    assert ahead.part_seconds["waits"] < 0.25 * late.part_seconds["waits"]


@pytest.mark.parametrize("method", ["infinigen", "hgca"])
def test_infinigen_waits_for_the_link_and_hgca_for_the_workers(method: str) -> None:
    link = linked(A100, 5)
    cpu = A100.replace(
        cpu_attention_bytes_per_s=twice(A100.cpu_attention_bytes_per_s),
        host_read_bytes_per_s=twice(A100.host_read_bytes_per_s),
    )
    usual, with_link, with_cpu = (
        decode_step(machine, SHAPE, CONFIG, method, 32768, 40).part_seconds["waits"] for machine in (A100, link, cpu)
    )
    helped, same = (with_link, with_cpu) if method == "infinigen" else (with_cpu, with_link)
    assert helped < 0.8 * usual and same == pytest.approx(usual, rel=0.05)


def test_per_layer_keys_count_the_layers_with_attention() -> None:
    """Every second layer has no attention, so the configuration's layer 2 is the model's layer 5."""
    mixed = ModelShape("h", 8, 32, 8, 128, 4096, 14336, 128256, "bfloat16", False, 0, (0, None) * 4)

    def seconds(**settings_: Any) -> float:
        return decode_step(A100, mixed, keys(**settings_), "scout", 60_000, 16, cpu_share=0.5).seconds

    usual = seconds(recall={"enabled": False})
    assert seconds(recall={"enabled": False}, lookahead={"skip_layers": [2]}) > usual
    assert seconds(recall={"intervals": [8, 8, 8, 8]}) == seconds(recall={"intervals": 8})
    assert seconds(recall={"intervals": [8, 8, 8, 1]}) != seconds(recall={"intervals": 8})


def test_a_stock_step_is_the_sum_of_what_it_reads() -> None:
    """Matrices once, K and V once, at 80 % of the data sheet's bandwidth, and two overheads."""
    machine = find_hardware("h100")
    layer = 4096 * 128 * (2 * 32 + 2 * 8) * 2 + 3 * 4096 * 14336 * 2
    read = 8 * layer + 128256 * 4096 * 2 + 8 * 4 * 10_000 * 2 * 8 * 128 * 2
    step = decode_step(machine, SHAPE, CONFIG, "stock", 10_000, 4)
    assert step.seconds == pytest.approx(read / (0.8 * 3350e9) + 8 * 20e-6 + 2e-3)
    assert step.tokens_per_s == pytest.approx(4 / step.seconds)
    assert (step.pcie_bytes, step.cpu_bytes) == (0, 0)
    assert step.idle_share == pytest.approx(2e-3 / step.seconds)


def test_large_batches_wait_for_the_multipliers() -> None:
    small, large = (decode_step(find_hardware("t4"), SHAPE, CONFIG, "stock", 1, n).seconds for n in (1024, 2048))
    assert large > 1.9 * small


def test_headinfer_moves_the_whole_context_and_does_nothing_slower() -> None:
    step = decode_step(A100, SHAPE, CONFIG, "headinfer", 100_000, 2)
    assert step.pcie_bytes == 8 * 2 * 100_000 * SHAPE.token_bytes
    assert step.seconds == pytest.approx(step.pcie_bytes / A100.link_achieved(SHAPE.page_bytes(32)), rel=0.02)


def test_scout_sends_its_share_to_the_cpu_and_recalls_it_once_per_interval() -> None:
    step = decode_step(A100, SHAPE, CONFIG, "scout", 50_000, 4, cpu_share=0.1)
    selected = 8 * 4 * 2048 * SHAPE.token_bytes
    answers = 8 * Costs(A100, SHAPE, CONFIG, 50_000, 4).answer_bytes
    assert step.cpu_bytes == pytest.approx(0.1 * selected)
    assert step.pcie_bytes == pytest.approx(0.1 * selected / 8 + answers)


def test_infinigen_copies_what_scout_computes() -> None:
    step = decode_step(A100, SHAPE, CONFIG, "infinigen", 50_000, 4, cpu_share=0.1)
    assert (step.pcie_bytes, step.cpu_bytes) == (pytest.approx(0.1 * 8 * 4 * 2048 * SHAPE.token_bytes), 0)


def test_clo_loads_the_selections_of_the_heads_that_miss_but_for_sinks_and_recent_pages() -> None:
    step = decode_step(A100, SHAPE, CONFIG, "clo", 50_000, 4)
    pages = CONFIG.budget_pages - CONFIG.sinks - CONFIG.recent
    assert step.pcie_bytes == pytest.approx((1 - 0.7922) * 8 * 4 * pages * SHAPE.page_bytes(32))


def in_place_digests(**selection: Any) -> float:
    """Return the bytes that one layer scores per step in place, from the simulated time."""
    step = decode_step(ON_CPU, SHAPE, keys(selection=selection), "quest", 50_000, 4)
    rate = CODE_RATE if "digest" in selection else DIGEST_RATE
    return step.part_seconds["digests"] / SHAPE.layers * rate * ON_CPU.hbm_achieved


def test_in_place_every_eighth_step_scores_all_pages_and_the_others_four_times_the_budget() -> None:
    every, eighth = in_place_digests(interval=1), in_place_digests(interval=8)
    candidates = 4 * CONFIG.budget_pages * 2 * SHAPE.kv_heads * SHAPE.head_dim * 4
    assert every == pytest.approx(Costs(ON_CPU, SHAPE, CONFIG, 50_000, 4).digest_bytes_in_place)
    assert eighth == pytest.approx((every + 7 * candidates) / 8)


def test_in_place_codes_read_the_middles_of_all_pages_and_the_codes_of_some() -> None:
    budget, pages = CONFIG.budget_pages, -(-50_000 // CONFIG.page_size)
    middle = SHAPE.kv_heads * SHAPE.head_dim * 4
    look = (pages + 3 * 4 * budget) * middle
    assert in_place_digests(digest="codes", interval=1) == pytest.approx(look)
    between = 4 * (3 * 4 * budget + 4 * 2 * budget) / 7 * middle
    assert in_place_digests(digest="codes") == pytest.approx((look + 7 * between) / 8)


@pytest.mark.parametrize("method", ["scout", "infinigen"])
def test_a_selection_that_lasts_is_paid_once(method: str) -> None:
    """Pages of 32 tokens end a selection, too: of 5 steps each, a page has 7. The launches stay."""
    steps = {
        interval: decode_step(A100, SHAPE, keys(exact_layers=[0], selection={"interval": interval}), method, 50_000, 4)
        for interval in (1, 4, 5, 32)
    }
    assert CONFIG.page_size == 32
    for interval, share in ((4, 8 / 32), (5, 7 / 32), (32, 1 / 32)):
        assert steps[interval].part_seconds["digests"] == pytest.approx(share * steps[1].part_seconds["digests"])
        assert steps[interval].part_seconds["launches"] == steps[1].part_seconds["launches"]
    seconds = [step.seconds for step in steps.values()]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


@pytest.mark.parametrize("method", ["scout", "infinigen", "clo"])
def test_low_load_costs_nothing(method: str) -> None:
    """While the context fits the frames, the step is the stock one."""
    own, stock = (decode_step(A100, SHAPE, CONFIG, name, 2000, 8) for name in (method, "stock"))
    assert own == stock


def test_launches_by_hand() -> None:
    """Seven sparse layers of 14 nodes and a whole one of 4, without those that the engine has in their place."""
    step = decode_step(A100, SHAPE, keys(exact_layers=[0]), "scout", 50_000, 4)
    nodes = 7 * (LAUNCHES["scout"].sparse - ENGINE_LAUNCHES) + LAUNCHES["scout"].whole - ENGINE_LAUNCHES
    assert step.part_seconds["launches"] == pytest.approx(nodes * KERNEL_SECONDS)
    assert step.part_seconds["gaps"] == pytest.approx(nodes * GAP_SECONDS)


def test_exact_layers_that_are_not_whole_leave_what_frames_cannot_hold_to_the_cpu() -> None:
    config = HybridConfig(exact_layers=(0,), whole_layers=())
    step = decode_step(A100, SHAPE, config, "scout", 50_000, 1, cpu_share=0.0)
    assert step.cpu_bytes == (50_000 - config.automatic_frames * config.page_size) * SHAPE.token_bytes


@pytest.mark.parametrize("method", ["scout", "infinigen"])
def test_exact_layers_that_are_whole_leave_nothing_to_anybody(method: str) -> None:
    whole, sparse = (
        decode_step(A100, SHAPE, HybridConfig(exact_layers=layers), method, 50_000, 1, cpu_share=0.0)
        for layers in ((0,), ())
    )
    assert whole.cpu_bytes == whole.pcie_bytes == 0
    assert whole.part_seconds["waits"] < 1e-4 and whole.seconds > sparse.seconds


def test_on_a_cpu_quest_waits_for_nobody_and_scouts_workers_take_turns_with_the_device() -> None:
    in_place, separate, none_away = (
        decode_step(ON_CPU, SHAPE, keys(recall={"enabled": False}), method, 50_000, 4, cpu_share=share)
        for method, share in (("quest", None), ("scout", 0.5), ("scout", 0.0))
    )
    assert in_place.cpu_bytes == in_place.pcie_bytes == in_place.part_seconds["waits"] == 0
    assert separate.cpu_bytes > 0 == separate.part_seconds["waits"]
    assert separate.seconds > max(none_away.seconds, in_place.seconds)


def test_quest_attends_all_pages_up_to_its_budget() -> None:
    dense, short = (decode_step(ON_CPU, SHAPE, CONFIG, method, 2048, 4) for method in ("dense", "quest"))
    assert short == dense and decode_step(ON_CPU, SHAPE, CONFIG, "quest", 2049, 4).part_seconds["digests"] > 0


def test_replicas_share_the_batch_and_the_host() -> None:
    one = find_hardware("h100")
    eight = one.replace(gpus=8)
    alone = decode_step(one, SHAPE, CONFIG, "scout", 50_000, 8, cpu_share=0.3)
    shared = decode_step(eight, SHAPE, CONFIG, "scout", 50_000, 64, cpu_share=0.3)
    assert shared.seconds > alone.seconds
    assert alone.tokens_per_s < shared.tokens_per_s < 8 * alone.tokens_per_s
    stock = [decode_step(x, SHAPE, CONFIG, "stock", 50_000, n).seconds for x, n in ((eight, 64), (one, 8))]
    assert stock[0] == stock[1]


# --- apex ---


def apex(
    strategy: str, cpu_rows: int, machine: Hardware = A100, context: int = 4000, device_rows: int = 10
) -> StepTime:
    config = keys(apex={"strategy": strategy})
    return decode_step(machine, SHAPE, config, "apex", context, device_rows + cpu_rows, cpu_rows=cpu_rows)


@few
@given(machines, st.integers(1, 1 << 17), st.integers(1, 256), st.sampled_from(["auto", "gpu", "lockstep", "overlap"]))
def test_without_cpu_rows_apex_is_the_device_alone(machine: Hardware, context: int, batch: int, strategy: str) -> None:
    stock = decode_step(machine, SHAPE, CONFIG, "stock", context, batch)
    assert apex(strategy, 0, machine, context, batch) == stock


@few
@given(machines, st.integers(1, 1 << 17), st.integers(1, 256), st.integers(1, 600))
def test_overlap_waits_for_nobody_and_attends_a_cpu_row_once_per_token(
    machine: Hardware, context: int, device_rows: int, cpu_rows: int
) -> None:
    step = apex("overlap", cpu_rows, machine, context, device_rows)
    assert step.part_seconds["waits"] == 0 and step.cpu_token_steps >= SHAPE.layers + 1
    attended = cpu_rows * context * SHAPE.token_bytes * SHAPE.layers
    assert step.cpu_bytes * step.cpu_token_steps == pytest.approx(attended)


def test_lockstep_waits_where_the_cpu_is_slower_than_the_devices_attention() -> None:
    few_rows, many = apex("lockstep", 1, device_rows=200), apex("lockstep", 50, device_rows=10)
    assert few_rows.part_seconds["waits"] == 0 < many.part_seconds["waits"]
    assert many.cpu_token_steps == 1 and many.cpu_bytes == 50 * 4000 * SHAPE.token_bytes * SHAPE.layers


def test_parked_rows_cost_nothing_until_the_multipliers_are_full() -> None:
    """A10: 75 TFLOP/s over 480 GB/s are 156.25 rows of two FLOPs per bf16 weight."""
    alone, full, more = (apex("overlap", n, find_hardware("a10"), 1300, 30) for n in (0, 126, 127))
    assert full.seconds == pytest.approx(alone.seconds)
    assert more.seconds > alone.seconds * 1.003


def test_reading_cpu_requests_over_the_bus_costs_the_bus() -> None:
    step = apex("gpu", 20)
    read = 20 * 4000 * SHAPE.token_bytes * SHAPE.layers
    assert step.pcie_bytes >= read and step.seconds > read / A100.link_achieved(math.inf)


def test_auto_overlaps_where_the_rule_says_so_and_a_batch_without_a_row_on_the_device_decodes() -> None:
    machine = find_hardware("h100")
    assert apex("auto", 70, machine) == apex("overlap", 70, machine)
    assert 0 < apex("auto", 4, machine, 32768, 0).tokens_per_s < apex("auto", 0, machine, 32768, 4).tokens_per_s


@pytest.mark.parametrize(("strategy", "layers_a_step"), [("lockstep", 8), ("overlap", 1)])
def test_on_a_cpu_the_workers_of_apex_take_turns_with_the_device(strategy: str, layers_a_step: int) -> None:
    step, alone = apex(strategy, 20, ON_CPU), apex(strategy, 0, ON_CPU)
    answer = Costs(ON_CPU, SHAPE, CONFIG, 4000, 20).cpu_attention(20 * 4000 * SHAPE.token_bytes)
    attention = alone.part_seconds["attention"] + layers_a_step * answer
    assert step.part_seconds["attention"] == pytest.approx(attention) and step.part_seconds["waits"] == 0


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("magic", 100, 1), {}, "'magic': cannot be simulated; write one of stock"),
        (("scout", 0, 1), {}, "context: got 0"),
        (("scout", 100, 0), {}, "batch: got 0"),
        (("scout", 100, 1), {"cpu_share": 1.0}, "cpu_share: got 1.0"),
        (("scout", 100, 1), {"cpu_share": -0.1}, "cpu_share: got -0.1"),
        (("apex", 100, 8), {"cpu_rows": 9}, "cpu_rows: got 9, expected up to 8"),
    ],
)
def test_bad_input_gets_one_line(arguments: tuple[str, int, int], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decode_step(find_hardware("t4"), SHAPE, CONFIG, *arguments, **options)


def test_what_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="exact_layers"):
        decode_step(find_hardware("t4"), SHAPE, HybridConfig(exact_layers=(8,)), "scout", 100, 1)
    with pytest.raises(ConfigError, match="cpu_rows: got 2, expected up to 8, or 0"):
        decode_step(find_hardware("t4"), WINDOWED, CONFIG, "apex", 100, 8, cpu_rows=2)
