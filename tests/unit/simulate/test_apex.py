"""What must hold of APEX's simulated steps (arXiv 2506.03296), and what the paper's model says of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import simulate_apex as bench
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Curve, Hardware, Number, find_hardware, machine_names
from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.methods.apex.rule import judge
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate import StepTime, WhatIf, decode_step, simulated_methods

SHAPE = ModelShape("m", 32, 32, 8, 128, 4096, 14336, 128256, "bfloat16", False, 0, (None,) * 32)
CONFIG = HybridConfig.model_validate({"recall": {"intervals": 1}})
ASYNCHRONOUS = ("apex_overlap", "apex_parked", "apex_parked_apart")
STRATEGIES = ("apex_gpu", "apex_lockstep", "apex_pipeline", *ASYNCHRONOUS)

machines = st.sampled_from(machine_names()).map(find_hardware)
strategies = st.sampled_from(STRATEGIES)
contexts = st.integers(1, 1 << 17)
rows = st.integers(1, 256)
cpu_row_counts = st.integers(1, 600)
few = settings(max_examples=40)


def run(
    machine: Hardware, strategy: str, context: int, device_rows: int, cpu_rows: int, shape: ModelShape = SHAPE
) -> StepTime:
    return decode_step(machine, shape, CONFIG, strategy, context, device_rows + cpu_rows, cpu_rows=cpu_rows)


def test_every_strategy_is_simulated() -> None:
    assert {name for name in simulated_methods() if name.startswith("apex_")} == set(STRATEGIES)


@few
@given(machines, contexts, rows, strategies)
def test_without_cpu_rows_all_are_the_device_alone(
    machine: Hardware, context: int, device_rows: int, strategy: str
) -> None:
    stock = decode_step(machine, SHAPE, CONFIG, "stock", context, device_rows)
    step = run(machine, strategy, context, device_rows, 0)
    assert (step.seconds, step.tokens_per_s) == (stock.seconds, stock.tokens_per_s)
    assert (step.cpu_bytes, step.pcie_bytes) == (0, 0)


@few
@given(machines, contexts, rows, cpu_row_counts, strategies)
def test_time_is_conserved(machine: Hardware, context: int, device_rows: int, cpu_rows: int, strategy: str) -> None:
    step = run(machine, strategy, context, device_rows, cpu_rows)
    assert step.device_busy + step.device_idle == pytest.approx(step.seconds)
    assert step.device_idle >= machine.step_overhead_s.value * (1 - 1e-9)
    assert 0 <= step.cpu_busy <= step.seconds * (1 + 1e-9)


@few
@given(machines, contexts, rows, cpu_row_counts)
def test_overlap_is_never_slower_than_the_device_alone(
    machine: Hardware, context: int, device_rows: int, cpu_rows: int
) -> None:
    """CPU rows add to the matrices in proportion to the tokens that they make, or less."""
    alone, step = (run(machine, s, context, device_rows, cpu_rows) for s in ("apex_gpu", "apex_overlap"))
    assert step.tokens_per_s >= alone.tokens_per_s * (1 - 1e-9)


@few
@given(machines, contexts, rows, cpu_row_counts, st.sampled_from(ASYNCHRONOUS))
def test_nobody_waits_for_the_cpu_where_its_answer_is_taken_later(
    machine: Hardware, context: int, device_rows: int, cpu_rows: int, strategy: str
) -> None:
    step = run(machine, strategy, context, device_rows, cpu_rows)
    assert step.device_idle == pytest.approx(machine.step_overhead_s.value)
    assert step.cpu_token_steps >= SHAPE.layers + 1


@few
@given(machines, contexts, rows, cpu_row_counts)
def test_a_cpu_row_attends_its_whole_context_once_per_token(
    machine: Hardware, context: int, device_rows: int, cpu_rows: int
) -> None:
    for strategy in STRATEGIES[1:]:
        step = run(machine, strategy, context, device_rows, cpu_rows)
        assert step.cpu_bytes * step.cpu_token_steps == pytest.approx(cpu_rows * context * SHAPE.token_bytes * 32)


@few
@given(
    machines, contexts, rows, cpu_row_counts, st.integers(1, 64), st.integers(1, 64), st.sampled_from(STRATEGIES[:-1])
)
def test_more_cores_never_make_fewer_tokens(
    machine: Hardware, context: int, device_rows: int, cpu_rows: int, a: int, b: int, strategy: str
) -> None:
    """Except parked_apart, which reads a layer once more each time that the CPU rows move on."""
    slow, fast = (
        run(WhatIf(cores=n).apply(machine), strategy, context, device_rows, cpu_rows).tokens_per_s
        for n in (min(a, b), max(a, b))
    )
    assert fast >= slow * (1 - 1e-9)


def ideal(ratio: float, linear: float, rows: int) -> tuple[Hardware, ModelShape]:
    """The paper's assumptions: matrices cost the same whatever the rows, no overheads, nothing but the layers. The
    attention of ``rows`` rows of one token takes 1 ms, the matrices of a layer ``linear`` ms."""

    def number(value: float) -> Number:
        return Number(value=value, source="test")

    def flat(rate: float) -> Curve:
        return Curve(points=((1.0, rate),), source="test")

    shape = ModelShape("ideal", 64, 32, 8, 128, 4096, 14336, 1, "bfloat16", False, 0, (None,) * 64)
    rate = rows * shape.token_bytes / 1e-3
    machine = find_hardware("a10").replace(
        linear_bytes_per_s=flat(shape.layer_weight_bytes / (linear * 1e-3)),
        device_attention_bytes_per_s=flat(rate),
        cpu_attention_bytes_per_s=flat(rate / ratio),
        host_read_bytes_per_s=flat(rate),
        layer_overhead_s=number(0),
        step_overhead_s=number(0),
        cpu_job_overhead_s=number(0),
    )
    return machine, shape


@pytest.mark.parametrize("linear", [0.3, 0.7, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("distance", [0.5, 0.9, 0.96, 1.04, 1.1, 2.0])
def test_pipelining_wins_on_the_side_of_inequality_6_that_the_rule_says(linear: float, distance: float) -> None:
    """``distance``: N_G / N_C over the bound; within 4 % of it the first and last layer decide, in which not all
    overlaps. As many CPU rows as the CPU attends in 2 T_gl + T_ga (Eq. 4)."""
    device_rows = 5000
    ratio = distance * (2 * linear + 3 + 1 / linear)
    machine, shape = ideal(ratio, linear, device_rows)
    cpu_rows = round(device_rows / ratio * (2 * linear + 1))
    verdict = judge(LayerTimes.of(machine, shape), device_rows, device_rows, cpu_rows)
    assert verdict.ratio / verdict.bound == pytest.approx(distance)
    alone, pipelined = (
        run(machine, s, 1, device_rows, cpu_rows, shape).tokens_per_s for s in ("apex_gpu", "apex_pipeline")
    )
    assert (pipelined > alone) == (verdict.wanted == "pipeline") == (distance < 1)


def test_pipelining_takes_what_equation_2_says() -> None:
    """2 T_gl + T_ga for each layer while the CPU's share fits: 64 x (2 x 2 + 1) ms, and waits in the last layer."""
    machine, shape = ideal(10, 2.0, 5000)
    step = run(machine, "apex_pipeline", 1, 5000, 2400, shape)  # Eq. 4 has room for 2,500
    assert step.device_busy == pytest.approx(64 * 5e-3, rel=1e-3)
    assert step.seconds == pytest.approx(64 * 5e-3, rel=0.02)


def test_lockstep_costs_nothing_while_the_cpu_hides_behind_the_devices_attention() -> None:
    machine, shape = ideal(10, 2.0, 5000)
    alone, hidden, late = (run(machine, "apex_lockstep", 1, 5000, n, shape) for n in (0, 500, 501))
    assert hidden.seconds == pytest.approx(alone.seconds)
    assert late.seconds == pytest.approx(alone.seconds + 64 * 1e-3 / 500)


def test_overlap_makes_what_the_papers_equations_leave_the_cpu() -> None:
    """The CPU has the whole iteration, so N_C comes on top of N_G T_ga / (T_gl + T_ga); L of L + 1 iterations are of
    use, in which the CPU waits less than the rest of an iteration."""
    machine, shape = ideal(10, 2.0, 5000)
    fitting = int(64 * 3e-3 * 500 / 1e-3)  # 64 layers of 3 ms, at 500 tokens per ms
    alone, step = (run(machine, s, 1, 5000, fitting, shape) for s in ("apex_gpu", "apex_overlap"))
    assert step.cpu_token_steps == 65
    assert step.tokens_per_s / alone.tokens_per_s == pytest.approx(1 + 0.1 * 3 * 64 / 65, rel=1e-3)
    later = run(machine, "apex_overlap", 1, 5000, fitting + 1000, shape)
    assert later.cpu_token_steps == 129  # the answers come an iteration late


def test_parked_rows_cost_nothing_until_the_multipliers_are_full() -> None:
    """A10: 75 TFLOP/s over 480 GB/s are 156.25 rows of two FLOPs per bf16 weight."""
    full, more = (run(find_hardware("a10"), "apex_parked", 1300, 30, n) for n in (126, 127))
    alone = run(find_hardware("a10"), "apex_gpu", 1300, 30, 0)
    assert full.seconds == pytest.approx(alone.seconds)
    assert more.seconds > alone.seconds * 1.003


def test_cpu_rows_apart_cost_one_more_layer_in_each_iteration() -> None:
    machine = find_hardware("a10")
    alone, apart = (run(machine, s, 1300, 30, 33) for s in ("apex_gpu", "apex_parked_apart"))
    layer = LayerTimes.of(machine, SHAPE).linear(33)
    assert apart.seconds - alone.seconds == pytest.approx(layer * 32 / 33)


def test_replicas_take_their_parts_of_both() -> None:
    one = find_hardware("h100")
    alone = run(one, "apex_overlap", 5000, 10, 20)
    eight = run(WhatIf(gpus=8).apply(one), "apex_overlap", 5000, 80, 160)
    assert eight.seconds == pytest.approx(alone.seconds)
    assert eight.cpu_bytes <= alone.cpu_bytes


def test_where_tiers_are_unified_there_is_no_other_place() -> None:
    machine = find_hardware("h100").replace(device="cpu")
    step, all_alike = run(machine, "apex_overlap", 5000, 10, 20), run(machine, "apex_gpu", 5000, 30, 0)
    assert (step.seconds, step.tokens_per_s) == (all_alike.seconds, all_alike.tokens_per_s)


@pytest.mark.parametrize("cpu_rows", [-1, 9])
def test_a_number_of_cpu_rows_that_cannot_be_gets_one_line(cpu_rows: int) -> None:
    with pytest.raises(ConfigError, match=rf"cpu_rows: got {cpu_rows}, expected an integer from 0 to batch 8"):
        decode_step(find_hardware("t4"), SHAPE, CONFIG, "apex_overlap", 100, 8, cpu_rows=cpu_rows)


def test_sliding_window_layers_are_refused() -> None:
    windowed = ModelShape("w", 8, 32, 8, 128, 4096, 14336, 128256, "bfloat16", False, 0, (1024, None) * 4)
    with pytest.raises(ConfigError, match="cpu_rows: got 2, but not all layers of w attend in full; write 0"):
        decode_step(find_hardware("t4"), windowed, CONFIG, "apex_overlap", 100, 8, cpu_rows=2)


def test_the_papers_load_gives_its_order() -> None:
    """Section 5.4's requests on the A10: overlap, what stock engines host of it, the device alone, pipelining."""
    gains = [bench.gain(bench.A10, s) for s in ("overlap", "parked_apart", "parked", "gpu", "pipeline")]
    assert gains == pytest.approx([1.354, 1.333, 1.127, 1.0, 0.968], abs=0.001)
    assert {s.what: s.holds for s in bench.statements() if s.source == "abstract"} == {
        "T4, LLaMa-2-7B: up to 49 % (5.2: 71 %) over NEO, by overlap": False,
        "T4, LLaMa-2-7B: 84 to 96 % over vLLM": False,
    }


@pytest.mark.parametrize(
    ("strategy", "like"), [("lockstep", "apex_lockstep"), ("overlap", "apex_parked"), ("auto", "apex_parked")]
)
def test_the_method_is_simulated_as_its_configuration_says(strategy: str, like: str) -> None:
    """`auto`: on an H100 with an eighth of the requests on the device the rule overlaps."""
    config = HybridConfig.model_validate({"apex": {"strategy": strategy}})
    machine, batch = find_hardware("h100"), 80
    step, expected = (decode_step(machine, SHAPE, config, name, 4000, batch, cpu_rows=70) for name in ("apex", like))
    assert step == expected


def test_reading_cpu_requests_over_the_bus_costs_the_bus() -> None:
    machine, config = find_hardware("h100"), HybridConfig.model_validate({"apex": {"strategy": "gpu"}})
    step = decode_step(machine, SHAPE, config, "apex", 4000, 30, cpu_rows=20)
    read = 20 * 4000 * SHAPE.token_bytes * SHAPE.layers
    assert step.pcie_bytes >= read and step.seconds > read / machine.link_achieved(math.inf)


def test_a_batch_of_which_nothing_is_on_the_device_decodes_all_the_same() -> None:
    on_cpu, here = (
        decode_step(find_hardware("h100"), SHAPE, HybridConfig(), "apex", 32768, 4, cpu_rows=n) for n in (4, 0)
    )
    assert 0 < on_cpu.tokens_per_s < here.tokens_per_s
