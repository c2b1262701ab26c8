"""Prompts of the simulated traffic: held to the runs on an H200, and the two ways of a prompt's KV."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench.simulate_runs import GPU_RUNS
from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.plan.traffic.prices import StepPrices
from hybrid_backend.tools.plan.traffic.prompts import Chunk, PromptPath, PromptTimes, _pairs
from tests.unit.traffic.servers import pair, prices, run

CUDA = (Path(__file__).parents[3] / "docs" / "lab" / "cuda.md").read_text()
OWN_MS, OVER_MS, OVER_TOKENS = 0.21, 0.41, 4096
"""FlashInfer on the H200: 2,048 tokens of a prompt in one layer, over themselves and over 4,096 earlier tokens."""


def attention_ms(chunk: Chunk) -> float:
    return 1e3 * PromptTimes(pair("h200")[1], PromptPath.STREAMED).attention(chunk)


def test_attention_of_prompts_takes_what_was_measured_on_an_h200() -> None:
    """Within 2 %: the two constants of prompts.py come from these two numbers, so this is no prediction."""
    assert f"FlashInfer {OWN_MS} ms over\nthemselves and {OVER_MS} ms over 4,096 earlier tokens (421 TFLOP/s)" in CUDA
    own = attention_ms(Chunk(0, 2048))
    assert own == pytest.approx(OWN_MS, rel=0.02)
    assert attention_ms(Chunk(OVER_TOKENS, 2048)) - own == pytest.approx(OVER_MS, rel=0.02)


def test_the_bus_is_as_fast_as_was_measured_on_an_h200() -> None:
    """Within 10 % of 55 GB/s (copies) and 52 GB/s (12 programs that read host memory)."""
    assert "the bus gave 55 GB/s" in CUDA and "52 GB/s by 12 programs" in CUDA
    rate = find_hardware("h200").link_achieved(math.inf)
    assert rate == pytest.approx(55e9, rel=0.10) and rate == pytest.approx(52e9, rel=0.10)


@pytest.mark.parametrize(("batch", "milliseconds"), [(run[1], run[3]) for run in GPU_RUNS if run[0] == "stock"])
def test_stock_s_decode_steps_are_those_of_the_runs_within_25_percent(batch: int, milliseconds: float) -> None:
    """As docs/lab/simulator.md says of the decode step itself: too slow, never too fast."""
    seconds = prices("stock", "h200").step(batch, 32768).seconds
    assert 1.0 < 1e3 * seconds / milliseconds < 1.25


def path_seconds(path: PromptPath, chunk: Chunk, bus: float = 1.0) -> float:
    server = pair()[1]
    curve = server.hardware.host_device_bytes_per_s.times(bus)
    hardware = server.hardware.replace(host_device_bytes_per_s=curve)
    return PromptTimes(replace(server, hardware=hardware), path).chunk(chunk, 2e-3).path


def test_a_streamed_prompt_waits_for_the_bus_and_one_in_frames_does_not() -> None:
    """With half the bus the streamed chunk takes longer. The other one reads nothing, and writes for longer."""
    in_frames = Chunk(30720, 2048, resident=30720)
    streamed, on_device = (path_seconds(path, in_frames) for path in PromptPath)
    assert streamed > 4 * on_device
    read_bytes = 38 * 30720 * 4096  # layers with frames, tokens, bytes of K and V
    half_bus = 0.5
    slower = path_seconds(PromptPath.STREAMED, in_frames, half_bus) - streamed
    taken = read_bytes / find_hardware("a100-80").link_achieved(math.inf) * 12 / 108
    assert slower > taken, "at least the processors that copy do so twice as long"
    written = 38 * 2048 * 4096 / find_hardware("a100-80").link_achieved(math.inf) * 12 / 108
    assert path_seconds(PromptPath.ON_DEVICE, in_frames, half_bus) - on_device == pytest.approx(written)


def test_what_frames_do_not_hold_is_read_back() -> None:
    """Each third of the prompt that is read back takes at least the processors of its copy, and one merge a block."""
    times = [path_seconds(PromptPath.ON_DEVICE, Chunk(30720, 2048, resident)) for resident in (30720, 20480, 10240, 0)]
    third = 38 * 10240 * 4096 / find_hardware("a100-80").link_achieved(math.inf) * 12 / 108
    assert all(later - earlier > third for earlier, later in pairwise(times))
    assert times[-1] < path_seconds(PromptPath.STREAMED, Chunk(30720, 2048))


def test_the_first_chunk_reads_nothing_in_either_way() -> None:
    streamed, on_device = (path_seconds(path, Chunk(0, 2048)) for path in PromptPath)
    assert streamed == on_device
    shorter = path_seconds(PromptPath.STREAMED, Chunk(0, 1024))
    assert 0 < shorter < streamed


def test_admission_copies_the_frames_over_the_bus_unless_they_are_there() -> None:
    """Streamed: 38 layers x the frames' bytes / the bus. On the device: nothing is waited for."""
    server, hardware = pair()[1], find_hardware("a100-80")
    size = 38 * server.frame_tokens * 4096
    streamed, on_device = (PromptTimes(server, path) for path in PromptPath)
    assert streamed.admission(32768, 32768) == pytest.approx(size / hardware.link_achieved(math.inf))
    assert on_device.admission(32768, 32768) == pytest.approx(2 * size / hardware.hbm_achieved)
    filled_beside = size / hardware.link_achieved(math.inf) * 12 / 108 + size / hardware.hbm_achieved
    assert on_device.admission(32768, 0) == pytest.approx(filled_beside)


@pytest.mark.parametrize("machine", ["a100-80", "h200", "l40s"])
def test_stock_is_first_then_the_device_then_the_bus(machine: str) -> None:
    """One request alone: stock's attention is as fast as its products, ours is slower, and the bus comes on top."""
    stock, hybrid = pair(machine)
    sides = [StepPrices(stock, PromptPath.STREAMED)]
    sides += [StepPrices(hybrid, path) for path in (PromptPath.ON_DEVICE, PromptPath.STREAMED)]
    ttft = [run(side, [0.0], 32768, 10).timings[0].ttft for side in sides]
    assert ttft == sorted(ttft) and ttft[0] < ttft[1] < ttft[2] < 1.5 * ttft[0]


def test_a_window_limits_the_keys_of_a_prompt() -> None:
    for earlier, tokens, window in ((0, 5, 3), (2, 4, 3), (10, 4, 3), (0, 3, 8), (6, 4, 8)):
        counted = sum(min(earlier + i + 1, window) for i in range(tokens))
        assert _pairs(Chunk(earlier, tokens), window) == counted
