"""Goodput, limits, the command `hybrid plan --traffic`, and the tables of docs/lab/simulator.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import simulate_traffic as tables
from bench.simulate_step import text
from hybrid_backend.cli import app
from hybrid_backend.tools.plan.traffic.engine import Engine
from hybrid_backend.tools.plan.traffic.prices import StepPrices
from hybrid_backend.tools.plan.traffic.prompts import PromptPath, shipped_path
from hybrid_backend.tools.plan.traffic.report import Limits, Traffic, _Simulation, percentile, simulate_traffic
from hybrid_backend.tools.plan.traffic.table import headline
from hybrid_backend.tools.plan.traffic.workload import ATTAINMENT, Slo, Workload
from tests.unit.traffic.servers import pair, prices, request

SIMULATOR = (Path(__file__).parents[3] / "docs" / "lab" / "simulator.md").read_text()
WORKLOAD = Workload(16384, 200, requests=200)
PLAN = ("plan", "qwen3-14b", "--machine", "a100", "--traffic", "16k:20")


def simulation(name: str, ttft: float, tpot: float, **changes: int) -> _Simulation:
    step_prices = prices(name, **changes)
    alone = Engine(prices("stock")).run([0.0], WORKLOAD.prompt, WORKLOAD.answer).timings[0]
    return _Simulation(step_prices, WORKLOAD, Limits(ttft * alone.ttft, tpot), alone)


def goodput(name: str, ttft: float, tpot: float, **changes: int) -> float:
    value = simulation(name, ttft, tpot, **changes).side(None).goodput
    assert value is not None
    return value


@pytest.mark.parametrize("name", ["stock", "scout"])
def test_a_looser_slo_never_has_a_smaller_goodput(name: str) -> None:
    by_ttft = [goodput(name, times, 0.2) for times in (1.0, 1.5, 3.0, 10.0)]
    by_tpot = [goodput(name, 5.0, tpot) for tpot in (0.01, 0.05, 0.1, 0.5)]
    assert by_ttft == sorted(by_ttft) and by_ttft[0] < by_ttft[-1]
    assert by_tpot == sorted(by_tpot) and by_tpot[0] < by_tpot[-1]


def test_more_memory_never_has_a_smaller_goodput() -> None:
    values = [goodput("stock", 20.0, 1.0, pool_blocks=blocks) for blocks in (600, 1200, 2400, 9000)]
    assert values == sorted(values) and values[0] < values[-1]


@pytest.mark.parametrize(("machine", "prompt"), [("a100-80", 32768), ("a100-80", 65536), ("h200", 32768)])
def test_within_the_slo_stock_gains_nothing_from_more_memory(machine: str, prompt: int) -> None:
    """The reason why a host pool does not double the goodput of cold prompts (docs/lab/simulator.md)."""
    workload = Workload(prompt, 1000, requests=200)
    stock = pair(machine, workload.context)[0]
    alone = Engine(StepPrices(stock, PromptPath.STREAMED)).run([0.0], prompt, 1000).timings[0]
    limits, goodputs = Limits(1.5 * alone.ttft, 0.05), []
    for blocks in (stock.pool_blocks, 100 * stock.pool_blocks):
        step_prices = StepPrices(replace(stock, pool_blocks=blocks), PromptPath.STREAMED)
        goodputs.append(_Simulation(step_prices, workload, limits, alone).side(None).goodput)
    assert goodputs[0] and goodputs[1] == pytest.approx(goodputs[0], rel=0.05)


def test_the_command_calls_a_small_difference_a_draw() -> None:
    result = traffic()
    assert result.ratio is not None
    sentence = "A factor below 1.3 is within the simulation's error."
    assert sentence in headline(replace(result, ratio=1.2)) and sentence in headline(replace(result, ratio=0.8))
    assert sentence not in headline(replace(result, ratio=0.5)) and sentence not in headline(replace(result, ratio=1.4))


@pytest.mark.parametrize("name", ["stock", "scout"])
def test_the_goodput_is_the_greatest_rate_within_the_slo(name: str) -> None:
    simulated = simulation(name, 2.0, 0.1)
    rate = goodput(name, 2.0, 0.1)
    assert simulated.limits.attainment(simulated.run(rate)) >= ATTAINMENT
    assert simulated.limits.attainment(simulated.run(1.03 * rate)) < ATTAINMENT


def test_a_goodput_of_8_devices_is_8_times_that_of_one() -> None:
    """Stock has no part in the host that devices share."""
    hardware = pair()[0].hardware
    eight = simulation("stock", 2.0, 0.1, hardware=hardware.replace(gpus=8)).side(None)  # type: ignore[arg-type]
    assert eight.goodput == pytest.approx(8 * goodput("stock", 2.0, 0.1), rel=0.02)


def test_percentiles_by_hand() -> None:
    values = list(range(100, 0, -1))
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50, 99, 100)
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize(
    ("name", "slo", "changes", "limit"),
    [
        ("stock", (1.5, 0.2), {}, "prefill compute: "),
        ("stock", (30.0, 1.0), {"pool_blocks": 600}, "memory: late first tokens wait for device memory"),
        ("scout", (30.0, 1.0), {"max_requests": 1}, "memory: late first tokens wait for one of 1 requests at once"),
        ("stock", (1.5, 0.01), {}, "decode: a token without load takes 22.6 ms, the SLO is 10 ms"),
        ("stock", (0.9, 0.1), {}, "prefill compute: a prompt without load takes 2.93 s, the SLO is 2.64 s"),
        ("stock", (1.5, 0.1), {"pool_blocks": 500}, "memory: holds no request of 16,584 tokens"),
    ],
)
def test_the_limit_names_what_requests_wait_for(
    name: str, slo: tuple[float, float], changes: dict[str, int], limit: str
) -> None:
    assert simulation(name, *slo, **changes).side(None).limit.startswith(limit)


def test_a_bus_too_slow_for_prompts_is_the_limit() -> None:
    """With a tenth of PCIe 4 what an earlier chunk left is read back for longer than the SLO has."""
    hardware = pair()[1].hardware
    slow = hardware.replace(host_device_bytes_per_s=hardware.host_device_bytes_per_s.times(0.1))
    assert simulation("scout", 1.5, 0.1, hardware=slow).side(None).limit.startswith("bus: ")  # type: ignore[arg-type]


def test_workers_too_slow_for_their_share_are_the_limit() -> None:
    hardware = pair()[1].hardware
    slow = hardware.replace(cpu_attention_bytes_per_s=hardware.cpu_attention_bytes_per_s.times(0.002))
    assert simulation("scout", 2.0, 0.05, hardware=slow).side(None).limit.startswith("workers: ")  # type: ignore[arg-type]


def traffic(path: PromptPath | None = None, rate: float | None = None) -> Traffic:
    return simulate_traffic(request(), WORKLOAD, Slo(), path=path, rate=rate)


def test_the_shipped_way_of_a_prompt_is_the_default() -> None:
    assert traffic() == traffic(shipped_path())
    assert traffic().prompt_path == shipped_path().value


def test_at_a_given_rate_both_have_the_same_arrivals_and_no_goodput() -> None:
    result = traffic(rate=0.05)
    assert result.ratio is None and result.stock.goodput is None and result.hybrid.goodput is None
    for side in (result.stock, result.hybrid):
        assert side.load is not None and side.load.rate == 0.05
        assert side.load.tokens_per_s == pytest.approx(0.05 * WORKLOAD.answer, rel=0.15)
        assert side.load.ttft_p50 <= side.load.ttft_p99 and side.load.tpot_p50 <= side.load.tpot_p99


def test_a_card_that_holds_no_request_has_a_goodput_of_0() -> None:
    workload = replace(WORKLOAD, prompt=131072, requests=20)
    result = simulate_traffic(request("l40s", workload.context), workload, Slo())
    assert (result.stock.holds, result.stock.goodput, result.stock.load) == (0, 0.0, None)
    assert result.ratio is None and result.hybrid.holds > 0


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    return result.exit_code, result.output


def test_the_command_shows_both_servers_and_their_limits() -> None:
    code, shown = invoke(*PLAN, "--rate", "0.05")
    assert code == 0
    for line in (
        "stock without load: TTFT 2.93 s",
        "scout without load: TTFT 3.22 s",
        "stock is limited by",
        "on the device",
    ):
        assert line in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_a_machine_that_holds_no_request_ends_with_1() -> None:
    code, shown = invoke("plan", "qwen3-14b", "--machine", "t4", "--traffic", "16k:20")
    assert code == 1 and "stock is limited by memory: holds no request of 16,404 tokens" in shown


def test_json_has_the_fields_of_the_documentation() -> None:
    code, shown = invoke(*PLAN, "--rate", "0.05", "--json")
    data = json.loads(shown)
    assert code == 0 and data["workload"] == {"prompt": 16384, "answer": 20, "seed": 0, "requests": 1000}
    assert data["slo"] == {"ttft_times": 1.5, "tpot_seconds": 0.05}
    assert data["stock"]["load"]["rate"] == 0.05 and data["stock"]["full"]["rate"] is None
    page = (Path(__file__).parents[3] / "docs" / "reference" / "plan.md").read_text()
    keys = [*data, *data["stock"], *data["stock"]["load"]]
    assert [key for key in keys if f"`{key}`" not in page] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traffic", "32k"], "--traffic: got '32k', expected tokens of a prompt and of an answer"),
        (["--traffic", "0:10"], "--traffic: got '0:10', expected"),
        (["--traffic", "900M:10"], "--traffic: got '900M:10', expected"),
        (["--traffic", "8k:10", "--rate", "-1"], "--rate: got -1, expected requests per second"),
        (["--traffic", "8k:10", "--rate", "nan"], "--rate: got nan, expected requests per second"),
        (["--traffic", "8k:10", "--context", "8k"], "--context: got 8k beside --traffic 8k:10, which has the lengths"),
        (["--rate", "1"], "--rate: got 1 without --traffic; add --traffic"),
        (["--traffic", "8k:10", "--slo-ttft", "0"], "--slo-ttft: got 0, expected a number above 0"),
        (["--traffic", "8k:10", "--slo-tpot", "inf"], "--slo-tpot: got inf, expected a number above 0"),
        (["--traffic", "8k:10", "--batch", "0"], "--batch: got 0, expected an integer >= 1"),
        (
            ["--traffic", "8k:10", "--method", "apex"],
            "method: got 'apex', whose traffic is not simulated; add --method",
        ),
        (["--traffic", "8k:10", "--method", "scout", "--method", "clo"], "--method: got scout, clo, expected one"),
        (["--traffic", "8k:10", "--machine", "epyc-7313"], "--traffic: epyc-7313 is a CPU server"),
        (["--traffic", "8k:10", "--machine", "", "--gpu-mem", "48", "--ram", "256"], "add --machine"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments: list[str], message: str) -> None:
    machine = [] if "--machine" in arguments else ["--machine", "a100"]
    if "" in arguments:
        place = arguments.index("")
        arguments = [*arguments[: place - 1], *arguments[place + 1 :]]
    code, shown = invoke("plan", "qwen3-14b", *machine, *arguments)
    assert code == 1 and message in shown and shown.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "prompt", "answer"),
    [("Qwen3-14B on an A100-80", 64, 200), ("Qwen3-14B on an H200", 128, 200), ("Qwen3-14B on an L40S", 64, 200),
     ("Qwen3-8B on an L40S", 64, 200)],
)  # fmt: skip
def test_the_documentation_has_todays_tables(title: str, prompt: int, answer: int) -> None:
    """One workload of each table; all of them take minutes (`python -m bench.simulate_traffic`)."""
    rows = text([tables.HEAD, *tables.case(*tables.MACHINES[title], prompt, answer)]).splitlines()
    section = SIMULATOR.partition(f"{title}:\n\n")[2].partition("\n\n")[0].splitlines()
    for line in rows:
        assert line in section


def test_the_documentation_has_a_row_for_each_workload_and_server() -> None:
    for title in tables.MACHINES:
        section = SIMULATOR.partition(f"{title}:\n\n")[2].partition("\n\n")[0].splitlines()
        workloads = [f"{prompt}k:{answer}" for prompt in tables.PROMPTS for answer in tables.ANSWERS]
        assert [line.split(" | ")[0].strip("| ") for line in section[2:]] == [
            name for name in workloads for _ in range(4)
        ]
