"""The simulated engine obeys what any queue obeys, and schedules as vLLM does."""

from __future__ import annotations

import pytest

from hybrid_backend.tools.plan.simulate import decode_step
from hybrid_backend.tools.plan.traffic.engine import Engine, Run
from hybrid_backend.tools.plan.traffic.prices import StepPrices
from hybrid_backend.tools.plan.traffic.prompts import Chunk, PromptPath
from hybrid_backend.tools.plan.traffic.workload import Workload
from tests.unit.traffic.servers import QWEN3_14B, pair, prices, run

SMALL = {"pool_blocks": 2300}
"""A device that holds two prompts of 32k with their first answers' tokens, and not their ends."""
CASES = [
    pytest.param("stock", {}, 0.02, id="stock, little load"),
    pytest.param("stock", {}, 1.0, id="stock, overload"),
    pytest.param("stock", SMALL, 1.0, id="stock, preempting"),
    pytest.param("scout", {}, 0.05, id="scout, some load"),
    pytest.param("scout", {"max_requests": 3}, 1.0, id="scout, few frames"),
]
WORKLOAD = Workload(32768, 5000, requests=40)


def simulated(name: str, changes: dict[str, int], rate: float) -> Run:
    return run(prices(name, **changes), WORKLOAD.arrivals(rate), WORKLOAD.prompt, WORKLOAD.answer)


@pytest.mark.parametrize(("name", "changes", "rate"), CASES)
def test_no_arrival_is_lost(name: str, changes: dict[str, int], rate: float) -> None:
    result = simulated(name, changes, rate)
    assert [timing.arrival for timing in result.timings] == WORKLOAD.arrivals(rate)
    assert all(timing.arrival < timing.first_token < timing.finish for timing in result.timings)
    assert {timing.tokens for timing in result.timings} == {WORKLOAD.answer}


@pytest.mark.parametrize(("name", "changes", "rate"), CASES)
def test_the_device_works_whenever_there_is_a_request(name: str, changes: dict[str, int], rate: float) -> None:
    """Idle time is exactly the time in which no request has arrived and not ended."""
    result = simulated(name, changes, rate)
    occupied, end = 0.0, 0.0
    for timing in result.timings:
        occupied += max(0.0, timing.finish - max(end, timing.arrival))
        end = max(end, timing.finish)
    assert result.busy_parts.seconds == pytest.approx(occupied)
    assert result.busy_parts.seconds + result.idle_seconds == pytest.approx(result.seconds)


@pytest.mark.parametrize(("name", "changes", "rate"), CASES)
def test_memory_is_never_over_the_pool(
    name: str, changes: dict[str, int], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are counted from the requests that run, after each step, not by the engine's own sum."""
    step_prices, taken = prices(name, **changes), []
    spend = Engine._spend

    def watched(engine: Engine, *arguments: object, **keywords: object) -> None:
        taken.append(sum(step_prices.server.blocks_of(request.computed) for request in engine._running))
        assert len(engine._running) <= step_prices.server.max_requests
        spend(engine, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "_spend", watched)
    result = simulated(name, changes, rate)
    assert max(taken) <= result.most_blocks <= step_prices.server.pool_blocks


@pytest.mark.parametrize(("name", "changes", "rate"), CASES)
def test_equal_steps_run_together_give_the_times_of_single_steps(
    name: str, changes: dict[str, int], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = simulated(name, changes, rate)
    monkeypatch.setattr(Engine, "_repeats", lambda *_: 1)
    monkeypatch.setattr(Engine, "_compute_alone", lambda *_: None)
    one_by_one = simulated(name, changes, rate)
    assert [x.first_token for x in together.timings] == pytest.approx([x.first_token for x in one_by_one.timings])
    assert [x.finish for x in together.timings] == pytest.approx([x.finish for x in one_by_one.timings])
    assert together.preemptions == one_by_one.preemptions


@pytest.mark.parametrize(("name", "changes", "rate"), CASES)
def test_a_request_s_time_is_the_sum_of_its_parts(name: str, changes: dict[str, int], rate: float) -> None:
    for timing in simulated(name, changes, rate).timings:
        assert sum(timing.first_parts[:-1]) == pytest.approx(timing.ttft)
        assert sum(timing.later_parts[:-1]) == pytest.approx(timing.finish - timing.first_token)


def test_first_tokens_come_in_the_order_of_arrival() -> None:
    for name in ("stock", "scout"):
        first = [timing.first_token for timing in simulated(name, {}, 1.0).timings]
        assert first == sorted(first)


def test_one_seed_gives_one_result() -> None:
    step_prices, runs = prices("scout"), []
    for seed in (1, 1, 2):
        workload = Workload(16384, 50, seed=seed, requests=30)
        runs.append(run(step_prices, workload.arrivals(0.1), workload.prompt, workload.answer))
    assert runs[0] == runs[1] != runs[2]


def test_stock_alone_takes_the_time_of_its_prompt_by_hand() -> None:
    """A100-80: 312 TFLOP/s and 1,935 GB/s, of which 60 and 80 % are reached; chunks of 2,048 tokens.

    Qwen3-14B: 40 layers of 40 heads of 128 channels, hidden size 5,120, MLP 17,408, 8 KV heads, 151,936 words.
    """
    prompt, chunk, flops, bandwidth = 32768, 2048, 0.6 * 312e12, 0.8 * 1935e9
    weights = 5120 * 128 * (40 + 8 + 8) + 40 * 128 * 5120 + 3 * 5120 * 17408
    products = 2 * weights * prompt * 40
    attention = 4 * 40 * 128 * prompt * (prompt + 1) / 2 * 40
    per_chunk = 40 * 20e-6 + 151936 * 5120 * 2 / bandwidth + 2e-3  # kernels of a layer, logits, engine
    by_hand = (products + attention) / flops + prompt // chunk * per_chunk
    step_prices = prices("stock")
    assert step_prices.server.chunk_tokens == chunk
    alone = run(step_prices, [3.0], prompt, 100).timings[0]
    assert alone.ttft == pytest.approx(by_hand, rel=1e-6)
    hardware = step_prices.server.hardware
    step = decode_step(hardware, QWEN3_14B, step_prices.server.config, "stock", prompt + 50, 1)
    assert alone.tpot == pytest.approx(step.seconds, rel=0.005)


def test_a_single_queue_waits_as_pollaczek_and_khinchine_say() -> None:
    """Prompts of one full step and one token of answer are an M/D/1 queue: W = load x service / 2 (1 - load)."""
    step_prices = prices("stock")
    chunk = step_prices.server.chunk_tokens
    service = run(step_prices, [0.0], chunk, 1).timings[0].ttft
    for load in (0.3, 0.7):
        workload = Workload(chunk, 1, requests=20000)
        timings = run(step_prices, workload.arrivals(load / service), chunk, 1).timings
        waiting = sum(timing.ttft for timing in timings) / len(timings) - service
        assert waiting == pytest.approx(load * service / (2 * (1 - load)), rel=0.08)


def test_stock_without_blocks_preempts_the_request_that_came_last() -> None:
    result = run(prices("stock", **SMALL), [0.0, 0.001], 32768, 5000)
    alone = run(prices("stock", **SMALL), [0.0], 32768, 5000)
    assert result.preemptions >= 1 and alone.preemptions == 0
    first, last = result.timings
    assert first.finish < last.finish
    # The second request computes its prompt and its tokens so far once more.
    assert result.busy_parts.prompts > 2.9 * alone.busy_parts.prompts
    assert last.later_parts[-1] > 0, "the second request is refused until the first has ended"


def test_the_host_pool_needs_no_preemption() -> None:
    """Its pool holds as many of the longest sequences as run at once."""
    result = run(prices("scout"), [0.0] * 100, 32768, 200)
    assert result.preemptions == 0


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    """vLLM's `scheduler_reserve_full_isl`."""
    blocks = pair()[0].blocks_of(32768 + 200)
    result = run(prices("stock", pool_blocks=2 * blocks - 20), [0.0, 0.0], 32768, 200)
    assert result.most_running == 1 and result.preemptions == 0
    assert result.timings[1].first_parts[-1] > 0
    assert run(prices("stock", pool_blocks=2 * blocks), [0.0, 0.0], 32768, 200).most_running == 2


def test_a_request_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no request of 32968 tokens"):
        run(prices("stock", pool_blocks=1000), [0.0], 32768, 200)


def test_decode_rows_cost_the_same_beside_a_prompt() -> None:
    """Their attention, copies and waits are those of a decode step; only the matrices are shared with the chunk."""
    step_prices: StepPrices = prices("scout", path=PromptPath.STREAMED)
    alone, beside = step_prices.step(8, 32768), step_prices.step(8, 32768, [Chunk(0, 2040)])
    assert (beside.decode, beside.workers, beside.engine) == (alone.decode, alone.workers, alone.engine)
    chunk = step_prices.step(0, 1, [Chunk(0, 2048)])
    assert 0.9 * chunk.prompts < beside.prompts < chunk.prompts
