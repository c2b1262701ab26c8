"""APEX's rule (arXiv 2506.03296) against its own inequality, and against numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Curve, Hardware, Number, find_hardware
from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.methods.apex.method import _machine
from hybrid_backend.methods.apex.rule import bound, cpu_hides, hidden_tokens, judge
from hybrid_backend.step.request_room import RequestRoom

seconds = st.floats(1e-5, 1e-1)
rates = st.floats(1e3, 1e9)


def machine(*, memory: float = 1e12, flops: float = 1e15, cpu: float = 1e11, host: float = 1e12) -> Hardware:
    """Round numbers: rates in bytes (and FLOPs) per second, every efficiency 1, no overheads."""

    def number(value: float) -> Number:
        return Number(value=value, source="test")

    def flat(rate: float) -> Curve:
        return Curve(points=((1.0, rate),), source="test")

    return find_hardware("a10").replace(
        hbm_bytes_per_s=number(memory),
        hbm_efficiency=number(1),
        bf16_flops_per_s=number(flops),
        flops_efficiency=number(1),
        cpu_attention_bytes_per_s=flat(cpu),
        host_read_bytes_per_s=flat(host),
        layer_overhead_s=number(0),
        step_overhead_s=number(0),
        cpu_job_overhead_s=number(0),
    )


def layer(hardware: Hardware) -> LayerTimes:
    """1 GB of matrices (1 ms at 1 TB/s), 1,000 bytes of K and V per token."""
    return LayerTimes(hardware, 10**9, 2, 1000, 100)


def inequality_5(rate: float, cpu: float, linear: float, attention: float, window: float) -> float:
    """Left less right side of Inequality (5), as Algorithm 1 has it, over N_G."""
    left = (rate * attention + cpu * window) / (2 * linear + attention)
    return (left - rate * attention / (linear + attention)) / rate


@given(rates, rates, seconds, seconds)
def test_inequalities_5_and_6_agree(rate: float, cpu: float, linear: float, attention: float) -> None:
    limit = bound(linear, attention)
    a = linear / attention
    assert limit == pytest.approx(2 * a + 3 + 1 / a)
    assume(abs(rate / cpu / limit - 1) > 1e-6)  # on the bound itself rounding decides
    assert (rate / cpu < limit) == (inequality_5(rate, cpu, linear, attention, 2 * linear + attention) > 0)


@given(rates, rates, seconds, seconds, st.floats(0, 1), st.floats(0, 1))
def test_they_agree_with_prompts(
    rate: float, cpu: float, linear: float, attention: float, longer: float, more: float
) -> None:
    """``longer``: T_gl,pref less T_gl; ``more``: T_ga,pref less T_ga."""
    window = linear + longer + linear + attention + more
    limit = bound(linear, attention, window)
    assume(abs(rate / cpu / limit - 1) > 1e-6)
    assert (rate / cpu < limit) == (inequality_5(rate, cpu, linear, attention, window) > 0)
    assert limit >= bound(linear, attention)


@pytest.mark.parametrize(("cpu", "wanted"), [(1.6e11, "overlap"), (1.7e11, "pipeline")])
def test_both_sides_of_the_bound_by_hand(cpu: float, wanted: str) -> None:
    """T_gl = T_ga = 1 ms, so the bound is 6 and the device attends 1,000,000 tokens in T_ga. Pipelining: 3 ms, in which
    the CPU attends 3 ms x 1.6e8 = 480,000 or 510,000 tokens. (1,000,000 + 480,000) / 3 ms = 493 tokens per us, or 503,
    against 1,000,000 / 2 ms = 500 by the device alone."""
    times = layer(machine(cpu=cpu))
    verdict = judge(times, device_rows=10, device_tokens=10**6, cpu_rows=5)
    assert verdict.bound == pytest.approx(6)
    assert verdict.ratio == pytest.approx(1e12 / cpu)
    assert verdict.strategy == wanted


def test_a_prompt_gives_the_cpu_time() -> None:
    """By hand: 1,000 prompt tokens make the matrices 1.01 ms (1,010 rows x 1e9 FLOPs at 1e15/s), 1e9 pairs at 100 FLOPs
    are 0.1 ms; W = 1.01 + 1 + 1.1 ms = 3.11 ms, so the bound is 3.11 x 2 = 6.22 instead of 6."""
    times = layer(machine(cpu=1.64e11))  # the ratio is 6.098
    alone, beside = judge(times, 10, 10**6, 5), judge(times, 10, 10**6, 5, 1000, 10**9)
    assert beside.bound == pytest.approx(6.22)
    assert (alone.strategy, beside.strategy) == ("overlap", "pipeline")


@given(st.integers(1, 500), st.integers(1, 10**7), st.integers(1, 10**4), st.integers(0, 10**8))
def test_a_prompt_never_makes_the_bound_smaller(rows: int, tokens: int, prompt: int, pairs: int) -> None:
    times = layer(machine())
    assert judge(times, rows, tokens, 1, prompt, pairs).bound >= judge(times, rows, tokens, 1).bound


def test_without_cpu_requests_only_the_device_runs() -> None:
    assert judge(layer(machine(cpu=1e12)), 10, 10**6, cpu_rows=0).strategy == "gpu"
    assert judge(layer(machine(cpu=1e12)), 10, 10**6, 0, 1000, 10**6).strategy == "gpu"


def test_without_device_requests_there_is_nobody_to_slow_down() -> None:
    times = layer(machine(cpu=1e6))
    strategy, ratio, limit = judge(times, 0, 0, 5)
    assert (strategy, limit) == ("pipeline", math.inf)
    assert ratio == pytest.approx(1e6)
    assert cpu_hides(times, 0, 0, 10**9)


def test_the_cpu_hides_behind_the_devices_attention_and_nothing_else() -> None:
    """1,000,000 tokens on the device: 1 ms; the CPU attends 100,000 in it, less what a job needs by itself."""
    times = layer(machine(cpu=1e11))
    assert cpu_hides(times, 10, 10**6, 100_000)
    assert not cpu_hides(times, 10, 10**6, 100_001)
    slow = times.hardware.replace(cpu_job_overhead_s=Number(value=1e-4, source="test"))
    assert cpu_hides(replace(times, hardware=slow), 10, 10**6, 90_000)
    assert not cpu_hides(replace(times, hardware=slow), 10, 10**6, 90_001)


def test_the_cpu_is_no_faster_than_its_memory() -> None:
    assert layer(machine(cpu=1e11, host=5e10)).cpu_rate == 5e7


def test_the_papers_ratios_never_pipeline() -> None:
    """Section 3.2: at a between 1 / 1.5 and 2 the bound is about 5.8 to 7.5, and a CPU at a tenth of the GPU stays
    below it."""
    assert [bound(a, 1.0) for a in (1 / 1.5, 2.0)] == pytest.approx([5.833, 7.5], abs=1e-3)
    times = layer(machine(cpu=1e11))
    assert {judge(times, 10, tokens, 5).strategy for tokens in (500_000, 1_000_000, 1_500_000)} == {"overlap"}


# --- how many requests may run ---


@given(rates, rates, st.integers(1, 64), st.integers(1, 10**7), st.integers(1, 80))
def test_the_cpu_answers_hidden_tokens_within_the_time_that_the_device_takes_anyway(
    memory: float, cpu: float, rows: int, tokens: int, layers: int
) -> None:
    times = layer(machine(memory=1e3 * memory, cpu=1e3 * cpu, host=1e15))
    attention = times.attention(tokens, rows)
    lockstep = hidden_tokens(times, layers, rows, tokens, may_overlap=False)
    overlap = hidden_tokens(times, layers, rows, tokens, may_overlap=True)
    assert times.cpu_attention(lockstep) == pytest.approx(attention)
    assert times.cpu_attention(overlap) == pytest.approx(layers * (times.linear(rows) + attention))
    assert lockstep < overlap


def test_without_a_request_on_the_device_none_is_delayed_and_within_a_job_s_overhead_nothing_is_hidden() -> None:
    times = layer(machine())
    assert hidden_tokens(times, 32, 0, 0, may_overlap=False) == math.inf
    slow = layer(machine().replace(cpu_job_overhead_s=Number(value=1.0, source="test")))
    assert hidden_tokens(slow, 32, 8, 1000, may_overlap=False) == 0


lengths = st.lists(st.integers(1, 200), max_size=8)


@given(st.integers(0, 400), st.integers(0, 400), lengths, lengths)
def test_requests_start_as_long_as_the_device_or_the_cpu_has_room(
    device: int, cpu: int, running: list[int], waiting: list[int]
) -> None:
    started = RequestRoom(device, cpu).startable(running, waiting)
    assert 0 <= started <= len(waiting)
    assert started or running or not waiting, "somebody runs"
    placed = [0, 0]
    for tokens in [*running, *waiting[:started]]:
        placed[placed[0] + tokens > device] += tokens
    if started > (not running):
        assert placed[0] <= device
        is_alone_on_cpu = not running and placed[1] == waiting[0]  # The first one runs wherever it fits or not.
        assert placed[1] <= cpu or is_alone_on_cpu or sum(running) > device
    if started < len(waiting):
        rest = waiting[started]
        assert placed[0] + rest > device and placed[1] + rest > cpu


def test_a_request_that_fits_nowhere_waits_for_the_running_ones_and_so_do_those_behind_it() -> None:
    room = RequestRoom(device_tokens=100, cpu_tokens=50)
    assert room.startable([60], [40, 50, 1]) == 2
    assert room.startable([60], [30, 60, 5]) == 1
    assert room.startable([], [500, 5]) == 2, "one that is larger than both, and one that fits the device"
    assert room.startable([500], [100, 1]) == 1


def test_a_cpu_servers_rates_are_refused_for_a_gpu() -> None:
    with pytest.raises(
        ConfigError, match=r"apex.hardware: epyc-7313 is a CPU server, .*; write auto, or one of t4, a10"
    ):
        _machine("epyc-7313", torch.device("cuda"))
    assert _machine("epyc-7313", torch.device("cpu")).device == "cpu"
