"""What must hold of every simulated step, whatever the machine, the method and the load."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Hardware, Number, find_hardware, machine_names
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate import StepTime, WhatIf, decode_step, simulated_methods
from hybrid_backend.tools.plan.simulate.costs import Costs
from hybrid_backend.tools.plan.simulate.timeline import Timeline

SHAPE = ModelShape("m", 8, 32, 8, 128, 4096, 14336, 128256, "bfloat16", False, 0, (None,) * 8)
WINDOWED = ModelShape("w", 8, 32, 8, 128, 4096, 14336, 128256, "bfloat16", False, 0, (1024, None) * 4)
CONFIG = HybridConfig()
SPARSE = ("scout", "infinigen", "hgca")

machines = st.sampled_from(machine_names()).map(find_hardware)
methods = st.sampled_from(simulated_methods())
contexts = st.integers(1, 1 << 20)
batches = st.integers(1, 128)
switches = st.fixed_dictionaries({"lookahead": st.booleans(), "recall": st.booleans(), "cpu_share": st.floats(0, 0.9)})
configs = st.builds(
    lambda exact, interval, query, budget: HybridConfig.model_validate(
        {
            "exact_layers": exact,
            "recall": {"intervals": interval},
            "lookahead": {"partial_query": query},
            "budget_tokens": budget,
        }
    ),
    st.sampled_from([(), (0,), (0, 3)]),
    st.integers(1, 12),
    st.sampled_from(["predicted", "real"]),
    st.sampled_from([512, 2048, 4096]),
)
few = settings(max_examples=40)


@few
@given(machines, methods, configs, contexts, batches, switches, st.sampled_from([SHAPE, WINDOWED]))
def test_time_is_conserved(
    machine: Hardware,
    method: str,
    config: HybridConfig,
    context: int,
    batch: int,
    options: dict[str, float],
    shape: ModelShape,
) -> None:
    step = decode_step(machine, shape, config, method, context, batch, **options)  # type: ignore[arg-type]
    assert step.device_busy + step.device_idle == pytest.approx(step.seconds)
    assert step.device_idle >= machine.step_overhead_s.value * (1 - 1e-9)
    for busy in (step.device_busy, step.cpu_busy, step.pcie_busy):
        assert 0 <= busy <= step.seconds * (1 + 1e-9)


@few
@given(machines, methods, configs, contexts, batches, switches, st.integers(1, 64), st.integers(1, 64))
def test_more_cores_are_never_slower(
    machine: Hardware,
    method: str,
    config: HybridConfig,
    context: int,
    batch: int,
    options: dict[str, float],
    a: int,
    b: int,
) -> None:
    few_cores, many = (
        decode_step(WhatIf(cores=n).apply(machine), SHAPE, config, method, context, batch, **options)  # type: ignore[arg-type]
        for n in (min(a, b), max(a, b))
    )
    assert many.seconds <= few_cores.seconds * (1 + 1e-9)


@few
@given(machines, methods, contexts, batches, switches)
def test_a_faster_link_is_never_slower(
    machine: Hardware, method: str, context: int, batch: int, options: dict[str, float]
) -> None:
    times = [
        decode_step(WhatIf(pcie=n).apply(machine), SHAPE, CONFIG, method, context, batch, **options).seconds  # type: ignore[arg-type]
        for n in (3, 4, 5, 6)
    ]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))


@few
@given(machines, st.sampled_from(("stock", "dense", "headinfer", "hgca")), contexts, contexts, batches)
def test_a_longer_context_never_takes_less_time(machine: Hardware, method: str, a: int, b: int, batch: int) -> None:
    short, long = (decode_step(machine, SHAPE, CONFIG, method, n, batch) for n in (min(a, b), max(a, b)))
    assert long.seconds >= short.seconds * (1 - 1e-9)


@few
@given(
    machines,
    st.sampled_from(("scout", "infinigen", "clo")),
    st.integers(2176, 1 << 20),
    st.integers(2176, 1 << 20),
    batches,
)
def test_a_longer_context_never_takes_less_time_once_it_is_sparse(
    machine: Hardware, method: str, a: int, b: int, batch: int
) -> None:
    short, long = (decode_step(machine, SHAPE, CONFIG, method, n, batch) for n in (min(a, b), max(a, b)))
    assert long.seconds >= short.seconds * (1 - 1e-9)


@few
@given(machines, methods, contexts, batches, batches)
def test_a_larger_batch_never_takes_less_time(machine: Hardware, method: str, context: int, a: int, b: int) -> None:
    small, large = (decode_step(machine, SHAPE, CONFIG, method, context, n) for n in (min(a, b), max(a, b)))
    assert large.seconds >= small.seconds * (1 - 1e-9)


@few
@given(machines, contexts, batches, st.floats(0, 0.9), st.floats(0, 0.9))
def test_more_on_the_cpu_moves_more_bytes_there(
    machine: Hardware, context: int, batch: int, a: float, b: float
) -> None:
    little, much = (
        decode_step(machine, SHAPE, CONFIG, "scout", context, batch, cpu_share=share) for share in sorted((a, b))
    )
    assert much.cpu_bytes >= little.cpu_bytes


@few
@given(machines, contexts, batches, st.floats(0, 0.9))
def test_looking_ahead_helps_where_the_workers_are_what_is_waited_for(
    machine: Hardware, context: int, batch: int, share: float
) -> None:
    """What it may cost is the prediction itself, and that the first layer's job waits behind the second's."""
    ahead, beside = (
        decode_step(machine, SHAPE, CONFIG, "scout", context, batch, cpu_share=share, lookahead=on)
        for on in (True, False)
    )
    cost = SHAPE.layers * Costs(machine, SHAPE, CONFIG, context, batch).prediction + beside.cpu_busy / SHAPE.layers
    assert ahead.seconds <= beside.seconds + cost * (1 + 1e-9)


@few
@given(machines, contexts, batches, st.floats(0.1, 0.9))
def test_layers_that_are_not_predicted_cost_what_all_cost_without_the_lookahead(
    machine: Hardware, context: int, batch: int, share: float
) -> None:
    skips = CONFIG.lookahead.model_copy(update={"skip_layers": tuple(range(SHAPE.layers))})
    none = CONFIG.model_copy(update={"lookahead": skips})
    skipped, off = (
        decode_step(machine, SHAPE, config, "scout", context, batch, cpu_share=share, lookahead=on)
        for config, on in ((none, True), (CONFIG, False))
    )
    assert skipped.seconds == off.seconds


def test_per_layer_keys_count_the_layers_with_attention() -> None:
    """Of every two layers the first has no attention: the third one's turn is the sixth's."""
    mixed = ModelShape("h", 8, 32, 8, 128, 4096, 14336, 128256, "bfloat16", False, 0, (0, None) * 4)
    machine = find_hardware("a100")

    def seconds(**keys: Any) -> float:
        config = HybridConfig.model_validate(keys)
        return decode_step(machine, mixed, config, "scout", 60_000, 16, cpu_share=0.3, lookahead=True).seconds

    usual = seconds(recall={"enabled": False})
    assert seconds(recall={"enabled": False}, lookahead={"skip_layers": [2]}) > usual
    assert seconds(recall={"intervals": [8, 8, 8, 8]}) == seconds(recall={"intervals": 8})
    assert seconds(recall={"intervals": [8, 8, 8, 1]}) != seconds(recall={"intervals": 8})


def test_a_stock_step_is_the_sum_of_what_it_reads() -> None:
    """By hand: matrices once, K and V once, at 80 % of the data sheet's bandwidth, and two overheads."""
    machine = find_hardware("h100")
    layer = 4096 * 128 * (2 * 32 + 2 * 8) * 2 + 3 * 4096 * 14336 * 2
    read = 8 * layer + 128256 * 4096 * 2 + 8 * 4 * 10_000 * 2 * 8 * 128 * 2
    step = decode_step(machine, SHAPE, CONFIG, "stock", 10_000, 4)
    assert step.seconds == pytest.approx(read / (0.8 * 3350e9) + 8 * 20e-6 + 2e-3)
    assert step.tokens_per_s == pytest.approx(4 / step.seconds)
    assert (step.pcie_bytes, step.cpu_bytes) == (0, 0)


def test_large_batches_wait_for_the_multipliers() -> None:
    machine = find_hardware("t4")
    small, large = (decode_step(machine, SHAPE, CONFIG, "stock", 1, n).device_busy for n in (1024, 2048))
    assert large > 1.9 * small


def test_headinfer_moves_the_whole_context() -> None:
    step = decode_step(find_hardware("a100"), SHAPE, CONFIG, "headinfer", 100_000, 2)
    assert step.pcie_bytes == 8 * 2 * 100_000 * SHAPE.token_bytes
    assert step.seconds == pytest.approx(step.pcie_busy, rel=0.02)  # nothing else is as slow


def test_scout_sends_its_share_to_the_cpu_and_recalls_it_once_per_interval() -> None:
    step = decode_step(find_hardware("a100"), SHAPE, CONFIG, "scout", 50_000, 4, cpu_share=0.1)
    selected = 8 * 4 * 2048 * SHAPE.token_bytes
    answers = 8 * Costs(find_hardware("a100"), SHAPE, CONFIG, 50_000, 4).answer_bytes
    assert step.cpu_bytes == pytest.approx(0.1 * selected)
    assert step.pcie_bytes == pytest.approx(0.1 * selected / 8 + answers)


def test_infinigen_copies_what_scout_computes() -> None:
    step = decode_step(find_hardware("a100"), SHAPE, CONFIG, "infinigen", 50_000, 4, cpu_share=0.1)
    assert step.pcie_bytes == pytest.approx(0.1 * 8 * 4 * 2048 * SHAPE.token_bytes)
    assert step.cpu_bytes == 0


heads = st.lists(st.integers(0, SHAPE.kv_heads), min_size=SHAPE.layers, max_size=SHAPE.layers)


@few
@given(machines, configs, contexts, batches, st.floats(0, 1), heads)
def test_clo_loads_the_selections_of_the_heads_that_miss_and_nothing_else(
    machine: Hardware, config: HybridConfig, context: int, batch: int, hits: float, persistent: list[int]
) -> None:
    config = config.model_copy(update={"exact_layers": ()})
    step = decode_step(machine, SHAPE, config, "clo", context, batch, hit_ratio=hits, persistent_heads=persistent)
    lanes = sum(SHAPE.kv_heads - count for count in persistent) * (1 - hits) * batch
    pages = config.budget_pages - config.sinks - config.recent
    sparse = not Costs(machine, SHAPE, config, context, batch).fits
    lane_page = 2 * config.page_size * SHAPE.head_dim * SHAPE.dtype_bytes
    assert step.pcie_bytes == pytest.approx(sparse * lanes * pages * lane_page, abs=1e-3)
    assert step.cpu_bytes == 0


@pytest.mark.parametrize("options", [{"hit_ratio": 1.0}, {"hit_ratio": 0.0, "persistent_heads": [8] * 8}])
def test_clo_loads_nothing_if_all_heads_hit_or_are_persistent(options: dict[str, float | list[int]]) -> None:
    step = decode_step(find_hardware("t4"), SHAPE, CONFIG, "clo", 50_000, 16, **options)  # type: ignore[arg-type]
    assert (step.pcie_bytes, step.pcie_busy) == (0, 0)
    assert step.device_idle == pytest.approx(2e-3)


def test_clo_without_a_hit_takes_as_long_as_loading_every_selection() -> None:
    """By hand: no layer is as slow as its load, so the link never rests but for the step's end."""
    machine = find_hardware("t4")
    step = decode_step(machine, SHAPE, CONFIG, "clo", 50_000, 64, hit_ratio=0.0)
    load = 64 * (2048 - 3 * 32) * SHAPE.token_bytes / machine.link_achieved(1 << 30)
    assert step.pcie_busy == pytest.approx(7 * load)
    assert 7 * load < step.seconds < 8 * load


@few
@given(machines, st.integers(2177, 1 << 20), batches, st.floats(0, 1), st.floats(0, 1), heads)
def test_more_hits_never_make_clo_slower(
    machine: Hardware, context: int, batch: int, a: float, b: float, persistent: list[int]
) -> None:
    few_hits, many = (
        decode_step(machine, SHAPE, CONFIG, "clo", context, batch, hit_ratio=hits, persistent_heads=persistent)
        for hits in sorted((a, b))
    )
    assert many.seconds <= few_hits.seconds * (1 + 1e-9)


@few
@given(machines, st.integers(2177, 1 << 20), batches, st.floats(0, 1), heads)
def test_a_slower_link_never_makes_clo_faster(
    machine: Hardware, context: int, batch: int, hits: float, persistent: list[int]
) -> None:
    times = [
        decode_step(
            WhatIf(pcie=n).apply(machine), SHAPE, CONFIG, "clo", context, batch, hit_ratio=hits,
            persistent_heads=persistent,
        ).seconds
        for n in (6, 5, 4, 3)
    ]  # fmt: skip
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(times))


def test_clo_hides_its_loads_one_layer_ahead() -> None:
    machine = find_hardware("a40")
    ahead, beside = (
        decode_step(machine, SHAPE, CONFIG, "clo", 50_000, 4, hit_ratio=0.9, lookahead=on) for on in (True, False)
    )
    assert ahead.device_idle == pytest.approx(2e-3)
    assert beside.device_idle == pytest.approx(2e-3 + ahead.pcie_busy)  # waited for in each layer, whole


def test_clo_in_place_saves_the_selection_where_a_head_hits() -> None:
    machine = find_hardware("h100").replace(device="cpu")
    hit, miss, scout = (
        decode_step(machine, SHAPE, CONFIG, method, 50_000, 4, hit_ratio=ratio, persistent_heads=[0] * 8).seconds
        for method, ratio in (("clo", 1.0), ("clo", 0.0), ("scout", None))
    )
    costs = Costs(machine, SHAPE, CONFIG, 50_000, 4)
    assert miss - hit == pytest.approx(8 * costs.scoring_in_place(costs.digest_bytes_in_place))
    # scout looks at all pages in some steps only
    saved = costs.digest_bytes_in_place - costs.digest_bytes_per_step
    assert miss - scout == pytest.approx(8 * (costs.lookup + costs.scoring_in_place(saved)))


def test_a_step_that_looks_at_kept_pages_reads_four_times_the_budget() -> None:
    machine = find_hardware("h100").replace(device="cpu")
    every, eighth = (
        Costs(machine, SHAPE, HybridConfig.model_validate({"selection": {"interval": n}}), 50_000, 4) for n in (1, 8)
    )
    assert every.digest_bytes_per_step == every.digest_bytes_in_place == eighth.digest_bytes_in_place
    kept = 4 * CONFIG.budget_pages * 2 * SHAPE.kv_heads * SHAPE.head_dim * 4
    assert eighth.digest_bytes_per_step == pytest.approx((every.digest_bytes_in_place + 7 * kept) / 8)


def test_a_step_with_codes_reads_the_middles_of_what_it_selects_among_and_codes_of_some() -> None:
    machine = find_hardware("h100").replace(device="cpu")
    every, default = (
        Costs(machine, SHAPE, HybridConfig.model_validate({"selection": {"digest": "codes", "interval": n}}), 50_000, 4)
        for n in (1, "auto")
    )
    budget, pages = CONFIG.budget_pages, -(-50_000 // CONFIG.page_size)
    assert pages > 4 * budget
    middle, rest = (n * SHAPE.kv_heads * SHAPE.head_dim * 4 for n in (1, 3))
    look = pages * middle + 4 * budget * rest
    assert every.code_bytes_per_step == pytest.approx(look)
    between = (3 * 4 * budget + 4 * 2 * budget) / 7  # at even tokens of all that a look has kept, at odd ones of half
    assert default.code_bytes_per_step == pytest.approx((look + 7 * between * (middle + rest)) / 8)
    assert (
        every.selecting_in_place > default.selecting_in_place > default.scoring_in_place(default.digest_bytes_per_step)
    )


@pytest.mark.parametrize("method", ["scout", "infinigen", "clo"])
def test_low_load_costs_nothing(method: str) -> None:
    """While the context fits the slots the step is the stock one."""
    machine = find_hardware("h100")
    mine, stock = (decode_step(machine, SHAPE, CONFIG, name, 2000, 8) for name in (method, "stock"))
    assert mine == stock


def test_without_anything_missing_nobody_waits() -> None:
    step = decode_step(find_hardware("t4"), SHAPE, CONFIG, "scout", 50_000, 64, cpu_share=0.0)
    assert step.device_idle == pytest.approx(2e-3)
    assert (step.cpu_busy, step.pcie_busy) == (0, 0)


def test_exact_layers_that_are_not_whole_leave_what_slots_cannot_hold_to_the_cpu() -> None:
    config = HybridConfig(exact_layers=(0,), whole_layers=())
    step = decode_step(find_hardware("a100"), SHAPE, config, "scout", 50_000, 1, cpu_share=0.0)
    assert step.cpu_bytes == (50_000 - config.automatic_frames * config.page_size) * SHAPE.token_bytes


@pytest.mark.parametrize("method", ["scout", "infinigen"])
def test_exact_layers_that_are_whole_leave_nothing_to_anybody(method: str) -> None:
    config = HybridConfig(exact_layers=(0,))
    machine = find_hardware("a100")
    whole = decode_step(machine, SHAPE, config, method, 50_000, 1, cpu_share=0.0)
    sparse = decode_step(machine, SHAPE, HybridConfig(), method, 50_000, 1, cpu_share=0.0)
    assert whole.cpu_bytes == whole.pcie_bytes == 0
    # A small layer may be over before the next one's pages are selected.
    assert whole.device_idle == pytest.approx(sparse.device_idle, rel=0.01)
    assert whole.seconds > sparse.seconds


def test_where_the_device_is_the_cpu_everything_is_one_queue() -> None:
    machine = find_hardware("h100").replace(device="cpu")
    in_place = decode_step(machine, SHAPE, CONFIG, "scout", 50_000, 4)
    assert in_place.cpu_busy == in_place.pcie_bytes == 0
    separate = decode_step(machine, SHAPE, HybridConfig(), "scout", 50_000, 4)
    assert separate.cpu_busy == 0
    assert separate.cpu_bytes > 0
    assert separate.seconds > in_place.seconds


def test_replicas_share_the_batch_and_the_host() -> None:
    one = find_hardware("h100")
    eight = WhatIf(gpus=8).apply(one)
    alone = decode_step(one, SHAPE, CONFIG, "scout", 50_000, 8, cpu_share=0.3)
    shared = decode_step(eight, SHAPE, CONFIG, "scout", 50_000, 64, cpu_share=0.3)
    assert shared.seconds > alone.seconds  # an eighth of the host's memory each
    assert alone.tokens_per_s < shared.tokens_per_s < 8 * alone.tokens_per_s
    assert (
        decode_step(eight, SHAPE, CONFIG, "stock", 50_000, 64).seconds
        == decode_step(one, SHAPE, CONFIG, "stock", 50_000, 8).seconds
    )


def test_a_resource_serves_in_order_and_waits_for_what_a_task_needs() -> None:
    time = Timeline()
    first = time.run("device", 2.0)
    copied = time.run("link", 1.0, first)
    assert (first, copied) == (2.0, 3.0)
    assert time.run("device", 1.0, copied) == 4.0  # idle from 2 to 3
    assert time.run("workers", 5.0) == 5.0
    assert time.run("device", 1.0, 5.0) == 6.0
    assert time.busy("device") == 4.0


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("magic", 100, 1), {}, "'magic': cannot be simulated; write one of stock"),
        (("scout", 0, 1), {}, "context: got 0"),
        (("scout", 100, 0), {}, "batch: got 0"),
        (("scout", 100, 1), {"cpu_share": 1.0}, "cpu_share: got 1.0"),
        (("scout", 100, 1), {"cpu_share": -0.1}, "cpu_share: got -0.1"),
        (("clo", 100, 1), {"hit_ratio": 1.1}, "hit_ratio: got 1.1"),
        (("clo", 100, 1), {"persistent_heads": [8] * 7}, "persistent_heads: got .* expected 8 numbers from 0 to 8"),
        (("clo", 100, 1), {"persistent_heads": [9] + [0] * 7}, "persistent_heads: got .* expected 8 numbers"),
    ],
)
def test_bad_input_gets_one_line(arguments: tuple[str, int, int], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decode_step(find_hardware("t4"), SHAPE, CONFIG, *arguments, **options)


def test_a_configuration_for_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="exact_layers"):
        decode_step(find_hardware("t4"), SHAPE, HybridConfig(exact_layers=(8,)), "scout", 100, 1)


def test_idle_share_is_idle_time() -> None:
    assert StepTime(2.0, 1.5, 0.5, 0, 0, 0, 0, 4).idle_share == 0.25
    assert Number(value=1, source="x").value == 1
