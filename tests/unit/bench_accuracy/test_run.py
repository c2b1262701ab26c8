"""The command itself, against an endpoint that reads its prompts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fastapi import FastAPI
from rich.console import Console
from typer.testing import CliRunner

from hybrid_backend.cli import app as cli
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench.accuracy import run
from hybrid_backend.tools.bench.accuracy.plan import Plan, make_cases
from hybrid_backend.tools.bench.accuracy.run import Driver
from hybrid_backend.tools.bench.accuracy.store import Result as Answered
from hybrid_backend.tools.bench.accuracy.task import ModelTokenizer
from hybrid_backend.tools.bench.accuracy.tasks import GENERATORS
from hybrid_backend.tools.bench.servers import configured
from tests.unit.bench_accuracy.solvers import SOLVERS
from tests.unit.status.server_stand import serving


def called(out: Path, *arguments: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(cli, ["bench", "accuracy", "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An OpenAI-compatible server that solves needle tasks by reading them."""
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "reader"}]}, methods=["GET"])

    @app.post("/v1/completions")
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"text": SOLVERS["niah_single_1"](body["prompt"])}]}

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"message": {"content": SOLVERS["niah_single_1"](body["messages"][0]["content"])}}]}

    with serving(app) as url:
        yield url


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_any_endpoint_is_scored_and_asked_only_once(api: str, endpoint: str, tmp_path: Path, model_dir: Path) -> None:
    arguments = ["--endpoint", endpoint, "--api", api, "--tasks", "niah_multiquery,niah_single_3"]
    arguments += ["--lengths", "500", "--samples", "2"]
    first = called(tmp_path, *arguments)
    assert first.exit_code == 0, first.output
    assert "| niah_multiquery | 2 |  | 1.00" in (tmp_path / "report.md").read_text()
    kept = (tmp_path / "results.jsonl").read_text()
    assert len(kept.splitlines()) == 4
    again = called(tmp_path, *arguments)
    assert again.exit_code == 0 and (tmp_path / "results.jsonl").read_text() == kept


def test_without_matplotlib_the_report_is_written_and_one_line_says_that_pictures_are_left_out(
    endpoint: str, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["--endpoint", endpoint, "--tasks", "niah_single_3", "--lengths", "500", "--samples", "1"]
    done = called(tmp_path, *arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("pictures are left out: matplotlib is not installed (pip install matplotlib)") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "report.md", "report.json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "scoot"], "--methods: no method 'scoot'"),
        (["--budgets", "100"], "--budgets: got 100, expected a multiple of the page size 16"),
        (["--budgets", "256,48"], "--budgets: got 48, expected more than the sinks and recent pages"),
        (["--set", "page_size=128", "--budgets", "64"], "--budgets: got 64, expected a multiple of the page size 128"),
        (["--methods", ""], "--methods: got '', expected names separated by commas"),
        (["--tasks", ","], "--tasks: got ',', expected names separated by commas"),
        (["--minutes", "-1"], "--minutes: got -1.0, expected 0 (never) or more"),
        (["--longbench-datasets", "trec"], "--longbench-datasets trec: give their folder with --longbench too"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: cannot be written (Not a directory)"),
        (["--lengths", "1k"], "--lengths 1k: write whole numbers above zero"),
        (["--tasks", "vt,niah_single_9"], "--tasks: no task 'niah_single_9'; there are niah_single_1, "),
        (
            ["--longbench", "/x", "--longbench-datasets", "quasar"],
            "--longbench-datasets: no dataset 'quasar'; there are",
        ),
        (["--question", "encode"], "--question encode: write prompt or decode"),
        (["--longbench", "/nowhere", "--longbench-datasets", "trec"], "--longbench /nowhere: lacks trec.jsonl"),
        (
            ["--in-place", "--methods", "hgca"],
            "--methods: no method with --in-place 'hgca'; there are quest, scout, infinigen",
        ),
        (["--budgets", "10%"], "--budgets: got 10%, expected less than 100%, and --in-place"),
        (["--in-place", "--budgets", "100%"], "--budgets: got 100%, expected less than 100%, and --in-place"),
        (
            ["--endpoint", "http://127.0.0.1:9", "--tasks", "vt"],
            "--endpoint: http://127.0.0.1:9/v1/models does not",
        ),
        (["--endpoint", "localhost:9", "--tasks", "vt"], "--endpoint: write the address with http://"),
        (["--host-pool", "8GB"], "--host-pool: got '8GB', expected a size; write 8GiB"),
        (["--host-pool", "1e9"], "--host-pool: got '1e9', expected a size; write it as 8GiB"),
        (["--set", "budget_token=1024"], "--set budget_token: "),
        (["--set", "method=scot"], "method: unknown method 'scot'"),
        (["--set", "method=hgca"], "--set method: the bench sets this key itself, for each of its servers; give --met"),
        (["--set", "budget_tokens=1024"], "--set budget_tokens: the bench sets this key itself"),
        (["--set", "hgca.window_tokens=64"], "--set hgca.window_tokens: the bench sets this key itself"),
        (["--set", "hgca={window_tokens: 64}"], "--set hgca.window_tokens: the bench sets this key itself"),
        (["--set", "metrics.sample_interval=4"], "--set metrics.sample_interval: the bench sets this key itself"),
        (["--in-place", "--set", "method=hgca"], "--set method: the bench sets this key itself"),
        (["--in-place", "--set", "sparse=never"], "--set sparse: the bench sets this key itself"),
        (["--model", "no-such-model"], "model 'no-such-model' is neither in the catalog"),
        (["smollm2"], "smollm2: not an option; flags of the servers' engine go after --"),
        (
            ["--endpoint", "http://localhost:9", "--", "--max-model-len", "64"],
            "--max-model-len: with --endpoint no server",
        ),
        (["--endpoint", "http://localhost:9", "--set", "budget_tokens=64"], "--set: with --endpoint no server"),
        (["--endpoint", "http://localhost:9", "--methods", "scout"], "--methods: with --endpoint no server"),
        (["--endpoint", "http://localhost:9", "--in-place"], "--in-place: with --endpoint no server"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, tmp_path: Path, model_dir: Path) -> None:
    done = called(tmp_path, *arguments)
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.fixture
def planned(tmp_path: Path, model_dir: Path) -> Callable[..., Driver]:
    """A driver of a small plan, with changes."""

    def driver(**changes: Any) -> Driver:
        plan = Plan("smollm2-135m-instruct", str(model_dir), ["scout"], [256], ["vt"], [600], samples=1)
        return Driver(replace(plan, **changes), tmp_path, Console(quiet=True))

    return driver


def test_prompts_within_a_budget_are_not_asked_and_no_method_is_asked_twice(planned: Callable[..., Driver]) -> None:
    sizes = {"budgets": [256, 1024], "tasks": ["vt", "qa_1"], "lengths": [600, 1100], "samples": 2}
    driver = planned(methods=["dense", "scout"], **sizes)
    assert driver.plan.servers() == [[("stock", 0)], [("dense", 0)], [("scout", 256)], [("scout", 1024)]]
    runs = [run for runs in driver.plan.servers() for run in runs]
    assert [len(driver.keys(*run)) for run in runs] == [8, 8, 8, 4]
    assert {key.length for key, _ in driver.keys("scout", 1024)} == {1100}
    keys = [key for run in runs for key, _ in driver.keys(*run)]
    assert len(set(keys)) == len(keys)


def test_pages_and_exact_layers_are_those_of_the_servers(planned: Callable[..., Driver]) -> None:
    driver = planned(overrides={"page_size": 32, "exact_layers": [0, 1], "sparse": "always"})
    assert (driver.page, driver.exact_layers) == (32, {0, 1})


@pytest.mark.parametrize("in_place", [False, True])
def test_a_servers_method_and_budget_are_those_of_its_name_whatever_is_set(
    in_place: bool, planned: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(run, "hybrid_server", lambda logs, keys, *_, **__: started.append(keys))
    driver = planned(in_place=in_place, overrides={"hgca": {"beta": 2.0}, "staging_tokens": 512})
    driver.server("scout", 256)
    config = configured(driver.plan.model, started[0])
    assert (config.method, config.hgca.beta, config.staging_tokens) == ("scout", 2.0, 512)
    assert in_place or config.budget_tokens == config.hgca.window_tokens == 256


def test_in_place_one_server_is_asked_everything_about_a_prompt_in_a_row(planned: Callable[..., Driver]) -> None:
    sizes = {"budgets": [256, 1024, 0.1], "tasks": ["vt", "qa_1"], "lengths": [600, 1100], "samples": 2}
    driver = planned(in_place=True, **sizes)
    [runs] = driver.plan.servers()
    missing = driver.missing_keys(runs)
    assert list(missing) == driver.cases
    for case, keys in missing.items():
        budgets = [256, 1024, 0.1] if len(case.ids) > 1024 else [256, 0.1]
        assert [(key.method, key.budget) for key in keys] == [("stock", 0), *(("scout", b) for b in budgets)]
        assert driver.tokens(0.1, case) == -(-len(case.ids) // (10 * driver.page)) * driver.page
    key = missing[driver.cases[0]][1]
    driver.results.add(Answered(key, 1.0, "found"))
    assert key not in planned(in_place=True, **sizes).missing_keys(runs)[driver.cases[0]]


def test_flags_of_the_engine_and_prompts_at_once_reach_every_server(
    planned: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run, "hybrid_server", lambda logs, keys, flags, **_: started.append((keys, flags)))
    monkeypatch.setattr(run, "stock_server", lambda logs, directory, flags, *_: started.append(({}, flags)))
    driver = planned(at_once=12, flags=["--max-model-len", "2048"])
    for method, budget in (("stock", 0), ("scout", 256)):
        driver.server(method, budget)
        keys, flags = started[-1]
        assert flags[flags.index("--max-num-seqs") + 1] == "12" and flags[-2:] == ["--max-model-len", "2048"]
        assert "metrics.sample_interval" not in keys, "the mass of answers that are decoded together is nobody's"
    with pytest.raises(ConfigError, match="holds results with engine flags"):
        planned()


@pytest.mark.parametrize("at_once", [1, 3])
def test_as_many_prompts_are_asked_at_once_as_were_asked_for(
    at_once: int, planned: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = planned(tasks=["vt", "qa_1"], samples=2, at_once=at_once)
    asked, together = list[Any](), threading.Barrier(at_once)

    def answered(server: object, key: Any, case: object, meter: object) -> Answered:
        if len(asked) < at_once:
            together.wait(30)
        asked.append(key)
        return Answered(key, 1.0, "found")

    monkeypatch.setattr(driver, "server", lambda *_: nullcontext())
    monkeypatch.setattr(driver, "answer", answered)
    monkeypatch.setattr(run, "MassMeter", lambda *_: None)
    driver.run_server([("scout", 256)], driver.missing_keys([("scout", 256)]))
    assert len(asked) == len(set(asked)) == 4 == len(driver.results.by_key)


def test_a_decoded_question_follows_the_context_token_by_token(tmp_path: Path, model_dir: Path) -> None:
    """Context and question are the prompt, cut between two of its tokens."""
    tokenizer = ModelTokenizer(str(model_dir))
    plan = Plan("smollm2-135m-instruct", str(model_dir), ["scout"], [256], list(GENERATORS), [900], samples=1)
    for case in make_cases(plan, tokenizer):
        context, question = tokenizer.text(list(case.ids[: case.split])), tokenizer.text(list(case.ids[case.split :]))
        assert 10 < len(case.ids) - case.split < 200
        assert question.strip().startswith(case.task.prompt[case.task.question_index :][:40]), case.task.name
        assert question.endswith(case.task.prefix)
        assert context[-200:].strip() in case.task.content
