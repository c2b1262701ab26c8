"""The throughput bench: fair turns, honest points, tables that say what was measured."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.tools.bench.client import BenchError, Endpoint
from hybrid_backend.tools.bench.load import WARM_UP, Point, Workload, find_tokenizer, point_from, run_client, sweep
from hybrid_backend.tools.bench.throughput import progress_line, table

A, B = (Endpoint(name, f"http://{name}", "m") for name in ("stock", "hybrid"))
WORK = Workload(prompts=8, input_length=32, output_length=4, goodput={"ttft": 1000, "tpot": 100})


def answer(tokens_per_second: float = 10.0, completed: int = 8, **changed: Any) -> dict[str, Any]:
    """What `vllm bench serve` writes, with the fields that are read."""
    return {
        "duration": 2.0, "completed": completed, "total_output_tokens": 4 * completed, "request_throughput": 4.0,
        "request_goodput": 3.0, "output_throughput": tokens_per_second, "median_ttft_ms": 1500.0, "p99_ttft_ms": 2500.0,
        "median_tpot_ms": 20.0, "p99_tpot_ms": 30.0, **changed,
    }  # fmt: skip


@given(
    endpoints=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True),
    rates=st.lists(st.floats(0.1, 9), min_size=1, max_size=5, unique=True),
    repeats=st.integers(1, 4),
)
def test_every_endpoint_gets_every_load_once_and_first_place_in_turn(
    endpoints: list[str], rates: list[float], repeats: int
) -> None:
    done: list[tuple[int, float, int, str]] = []

    def run(endpoint: Endpoint, workload: Workload, rate: float, seed: int) -> Mapping[str, Any]:
        done.append((sum(name == endpoint.name and r == rate for _, r, _, name in done), rate, seed, endpoint.name))
        return answer()

    sweep([Endpoint(name, "", "") for name in endpoints], rates, repeats, WORK, run, 7, lambda _: None)
    done = done[len(endpoints) :]  # without the warm-up
    loads: dict[tuple[int, float], list[tuple[int, str]]] = {}
    for repeat, rate, seed, name in done:
        loads.setdefault((repeat, rate), []).append((seed, name))
    assert len(loads) == repeats * len(rates)
    seeds = []
    for members in loads.values():
        assert sorted(name for _, name in members) == sorted(endpoints)
        assert len({seed for seed, _ in members}) == 1, "endpoints of one turn get the same prompts"
        seeds.append(members[0][0])
    assert len(set(seeds)) == len(seeds) and 7 not in seeds, "prompts come back in no other turn"
    firsts = [members[0][1] for members in loads.values()]
    counts = [firsts.count(name) for name in endpoints]
    assert max(counts) - min(counts) <= 1


def test_the_sweep_warms_each_endpoint_up_and_counts_only_the_rest() -> None:
    asked: list[tuple[str, int, float]] = []

    def run(endpoint: Endpoint, workload: Workload, rate: float, seed: int) -> Mapping[str, Any]:
        asked.append((endpoint.name, workload.prompts, rate))
        return answer()

    told: list[str] = []
    points = sweep([A, B], [1.0, math.inf], 2, WORK, run, seed=0, tell=lambda point: told.append(point.endpoint))
    assert asked[:2] == [("stock", WARM_UP, math.inf), ("hybrid", WARM_UP, math.inf)]
    assert len(points) == 8 and told[:4] == ["stock", "hybrid", "hybrid", "stock"]
    assert [point.endpoint for point in points] == ["stock"] * 4 + ["hybrid"] * 4
    assert {p.rate for p in points} == {1.0, None}


def shown(*points: Point) -> list[list[str]]:
    """The table as a terminal of 80 columns shows it: the words of each line."""
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(table(points, "title"))
    printed = screen.export_text()
    assert "…" not in printed, printed
    return [line.split() for line in printed.splitlines()]


def test_requests_that_failed_are_counted_and_shown() -> None:
    point = point_from(answer(completed=5), "stock", 1.0, 0, WORK)
    assert point.failed == 3 and ["failed", "3"] in shown(point)


def test_answers_of_another_length_are_refused() -> None:
    with pytest.raises(BenchError, match="30 tokens in 8 answers, not 4 in each"):
        point_from(answer(total_output_tokens=30), "stock", 1.0, 0, WORK)


@pytest.mark.parametrize("key", ["completed", "request_goodput", "p99_ttft_ms"])
def test_a_result_without_a_figure_is_refused_by_name(key: str) -> None:
    result = answer()
    del result[key]
    with pytest.raises(BenchError, match=key):
        point_from(result, "stock", 1.0, 0, WORK)


def test_the_table_gives_medians_ranges_and_ratios_of_the_same_repeat() -> None:
    speeds = {"stock": [10.0, 20.0, 40.0], "hybrid": [15.0, 20.0, 48.0]}
    points = [
        point_from(answer(speed), name, math.inf, repeat, WORK)
        for name, values in speeds.items()
        for repeat, speed in enumerate(values)
    ]
    rows = shown(*points)
    assert ["all", "at", "once"] in rows
    assert ["output", "tok/s", "20.0", "(10.0..40.0)", "20.0", "(15.0..48.0)"] in rows
    assert ["of", "the", "first", "1.00", "1.20", "(1.00..1.50)"] in rows, "each repeat is compared with its own"
    assert ["TTFT", "median", "s", "1.50", "1.50"] in rows


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ([], "give either running servers as NAME=URL, or --serve"),
        (["--serve", "a=http://x"], "give either running servers as NAME=URL, or --serve"),
        (["http://x"], "http://x: write NAME=URL"),
        (["a=x:8000"], "a=x:8000: write the address with http://"),
        (["a=http://127.0.0.1:9"], "a: http://127.0.0.1:9/v1/models does not list models"),
        (["--serve", "--rates", "1,fast"], "--rates 1,fast: write numbers above zero or inf"),
        (["--serve", "--rates", "0"], "--rates 0: write numbers above zero or inf"),
        (["--serve", "--good", "itl:5"], "--good itl:5: write ttft:MILLISECONDS,tpot:MILLISECONDS,e2el:MILLISECONDS"),
        (["--serve", "--good", "ttft:soon"], "--good ttft:soon: write ttft:MILLISECONDS"),
        (["--serve", "--good", "ttft:1,ttft:2"], "--good ttft:2: write ttft:MILLISECONDS"),
        (["--serve", "--client", "curl"], "--client curl: write auto or vllm or sglang"),
        (["--serve", "--set", "budget_token=64"], "--set budget_token: "),
        (["--serve", "--set", "method=scot"], "method: unknown method 'scot'"),
        (["--serve", "--out", "/dev/null/x"], "--out /dev/null/x: cannot be written (Not a directory)"),
        (["a=http://127.0.0.1:9", "--out", "/dev/null/x"], "--out /dev/null/x: cannot be written (Not a directory)"),
        (["--serve", "--set", "budget_tokens"], "--set 'budget_tokens': expected key=value"),
    ],
)
def test_bad_arguments_are_told(line: list[str], told: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "throughput", "--out", str(tmp_path), *line])
    assert result.exit_code == 1 and result.stdout == "" and result.stderr.startswith(f"error: {told}"), result.output
    assert result.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_table_is_shown_even_if_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [point_from(answer(), "stock", 1.0, 0, WORK)]
    monkeypatch.setattr("hybrid_backend.tools.bench.client.find_endpoint", lambda *_: A)
    monkeypatch.setattr("hybrid_backend.tools.bench.load.sweep", lambda *_: points)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "throughput.json").mkdir()
    line = ["bench", "throughput", "stock=http://x", "--tokenizer", str(tmp_path), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 1 and "TTFT" in result.stdout and "stock" in result.stdout
    assert result.stderr == f"error: --out {tmp_path}: cannot be written (Is a directory); give another --out\n"


def test_a_client_that_fails_is_quoted_by_its_last_line_and_its_output_is_kept(tmp_path: Path) -> None:
    nowhere, log = Endpoint("stock", "http://127.0.0.1:9", "/nonexistent"), tmp_path / "logs" / "client.log"
    with pytest.raises(BenchError, match=r"sglang's client failed on stock \(http://127.0.0.1:9\): .*\w") as failed:
        run_client("sglang", log, nowhere, WORK, 1.0, 1)
    assert str(failed.value).endswith(f"its output: {log}") and "\n" not in str(failed.value)
    assert log.read_text().strip().splitlines()[-1].strip()[:300] in str(failed.value)


def test_what_is_printed_fits_a_terminal_of_80_columns_uncut() -> None:
    points = [
        point_from(answer(1234.5 + repeat, median_ttft_ms=123456.7), name, rate, repeat, WORK)
        for name in ("stock-vllm-of-today", "hybrid")
        for rate in (0.25, math.inf)
        for repeat in range(3)
    ]
    rows = shown(*points)
    assert ["stock-vllm-of-today", "hybrid"] in rows and ["0.25", "req/s"] in rows
    assert rows.count(["output", "tok/s", "1235.5", "(1234.5..1236.5)", "1235.5", "(1234.5..1236.5)"]) == 2, rows
    lines = [progress_line(point, 3) for point in points]
    assert lines[-1] == "hybrid, all at once, run 3 of 3: 1236.5 tokens/s, TTFT 123.46 s, TPOT 20.0 ms"
    assert max(map(len, lines)) <= 100


def test_the_demo_models_name_is_its_tokenizer(model_dir: Path) -> None:
    assert find_tokenizer("", "smollm2-135m-instruct") == str(model_dir)


@pytest.mark.parametrize(
    ("option", "served", "told"),
    [
        ("", "gpt-mine", "the server's model 'gpt-mine' names no tokenizer here: model 'gpt-mine' is neither in"),
        ("/nowhere", "m", "--tokenizer /nowhere: model '/nowhere' is neither in the catalog"),
        ("no-such/model", "m", "--tokenizer no-such/model: "),
    ],
)
def test_a_tokenizer_that_is_not_here_is_told_in_one_line(
    option: str, served: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BenchError) as refused:
        find_tokenizer(option, served)
    assert str(refused.value).startswith(told) and str(refused.value).endswith(
        "give --tokenizer FOLDER (of the model) or org/name"
    )
