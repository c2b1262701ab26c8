"""``hybrid bench accuracy``, ready for typer. Imports are late, so that the command line starts at once.

The stock engine answers every prompt densely. Then one hybrid server per method and budget (separate tiers) answers the
same prompts, and follows the dense answers for its fidelity. With --in-place one hybrid server does all of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hybrid_backend.config import parse_size
from hybrid_backend.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_backend.tools.bench.accuracy.plan import Plan
    from hybrid_backend.tools.bench.accuracy.run import Driver
    from hybrid_backend.tools.bench.accuracy.task import Task

_SERVER_OPTIONS = ("methods", "budgets", "question", "overrides", "dtype", "host_pool", "in_place", "at_once")
"""Options that have a meaning only for servers that the bench starts."""


def accuracy(
    context: typer.Context,
    engine_flags: Annotated[
        list[str] | None, typer.Argument(help="after --: flags of every server's engine, as --max-model-len 32768")
    ] = None,
    model: Annotated[str, typer.Option(help="catalog name or directory of a Hugging Face model")] = (
        "smollm2-135m-instruct"
    ),
    methods: Annotated[
        str | None, typer.Option(help="names separated by commas; default: all but apex, in place scout")
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="tokens attended, or a share as 10%; of hgca the window")
    ] = "256,512,1024,2048,4096",
    tasks: Annotated[str, typer.Option(help="names separated by commas, all, or none")] = "all",
    lengths: Annotated[str, typer.Option(help="prompts in tokens")] = "1024,2048",
    samples: Annotated[int, typer.Option(min=1, help="prompts per task and length")] = 4,
    question: Annotated[
        str, typer.Option(help="prompt: part of it, as usual; decode: forced token by token")
    ] = "prompt",
    longbench_folder: Annotated[
        Path | None, typer.Option("--longbench", help="folder of LongBench's JSONL files")
    ] = None,
    longbench_datasets: Annotated[
        str | None, typer.Option(help="names separated by commas; default: ScoutAttention's eight")
    ] = None,
    longbench_length: Annotated[int, typer.Option(help="longest prompt in tokens; 0: the longest of --lengths")] = 0,
    endpoint: Annotated[str | None, typer.Option(help="score this running server instead, without fidelity")] = None,
    api: Annotated[str, typer.Option(help="of the endpoint: completions or chat")] = "completions",
    minutes: Annotated[float, typer.Option(help="stop after so many minutes; 0: never")] = 0,
    dtype: Annotated[str, typer.Option(help="of the model, as the engine takes it")] = "bfloat16",
    host_pool: Annotated[str, typer.Option(help="KV memory of each server")] = "1GiB",
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="one server, whose requests ask for their budgets"),
    ] = False,
    at_once: Annotated[
        int, typer.Option(min=1, help="prompts asked at once, for a GPU; mass is sampled with one only")
    ] = 1,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="one configuration key, as recall.enabled=false")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path("hybrid-bench/accuracy"),
) -> None:
    """Score every method at every budget on RULER-like and extraction tasks, against the dense answers of stock vLLM.

    Results are appended to OUT/results.jsonl as they come: the same command goes on where an interrupted one stopped
    (exit status 3: not finished). Writes OUT/report.md, report.json and report.png.
    """
    from hybrid_backend.tools.bench.accuracy.plan import Plan
    from hybrid_backend.tools.bench.accuracy.run import Driver, run_endpoint
    from hybrid_backend.tools.bench.accuracy.tasks import GENERATORS
    from hybrid_backend.tools.bench.client import Endpoint, base_url, served_models
    from hybrid_backend.tools.bench.options import check_out, parse_choice, parse_names, parse_numbers
    from hybrid_backend.tools.bench.servers import parse_overrides
    from hybrid_backend.tools.hub import resolve_model
    from hybrid_backend.tools.pictures import can_draw

    console = Console(soft_wrap=True)
    if not minutes >= 0:
        raise ConfigError(f"--minutes: got {minutes}, expected 0 (never) or more")
    if engine_flags and not engine_flags[0].startswith("-"):
        raise ConfigError(f"{engine_flags[0]}: not an option; flags of the servers' engine go after --")
    server_options = [*(engine_flags or ()), *_options_on_command_line(context, _SERVER_OPTIONS)]
    if endpoint is not None and server_options:
        message = "with --endpoint no server is started, and only scores are asked; leave it out"
        raise ConfigError(f"{server_options[0]}: {message}")
    length_list = parse_numbers("--lengths", lengths, int)
    directory = resolve_model(model)
    longbench_length = longbench_length or max(length_list)
    plan = Plan(
        model=model,
        directory=directory,
        methods=_methods(methods, in_place),
        budgets=_budgets(budgets, in_place),
        tasks={"all": list(GENERATORS), "none": []}.get(tasks) or parse_names("--tasks", tasks, "task", GENERATORS),
        lengths=length_list,
        samples=samples,
        question=parse_choice("--question", question, ("prompt", "decode")),
        external=_longbench(longbench_folder, longbench_datasets, longbench_length, directory, samples),
        external_length=longbench_length,
        dtype=dtype,
        pool=_pool(host_pool),
        in_place=in_place,
        at_once=at_once,
        flags=engine_flags or (),
        overrides=parse_overrides(overrides or ()),
        deadline=time.monotonic() + 60 * minutes if minutes else float("inf"),
    )
    check_out(out)
    parse_choice("--api", api, ("completions", "chat"))
    if endpoint is not None:
        url = base_url("--endpoint", endpoint)
        server = Endpoint(name="--endpoint", url=url, model=served_models("--endpoint", url, 30)[0])
        has_plot = can_draw(console)
        is_done = run_endpoint(plan, server, api, out, console)
    else:
        has_plot = can_draw(console)
        is_done = _run_interruptible(Driver(plan, out, console), console)
    _write_report(plan, out, console, has_plot)
    raise typer.Exit(0 if is_done else 3)


def _options_on_command_line(context: typer.Context, names: Collection[str]) -> list[str]:
    """Return those of the named options that the user wrote, as ``--at-once``."""
    sources = {p.opts[0]: context.get_parameter_source(p.name) for p in context.command.params if p.name in names}
    return [flag for flag, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _run_interruptible(driver: Driver, console: Console) -> bool:
    """Run until done, or until Ctrl-C or a plain kill, which stop the server and keep the results."""
    from hybrid_backend.tools.bench.servers import interruptible

    try:
        with interruptible():
            return driver.run()
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return False


def _write_report(plan: Plan, out: Path, console: Console, has_plot: bool) -> None:
    """Print and write the report of all results of the model that answer the plan's kind of question."""
    from hybrid_backend.tools.bench.accuracy.report import Report
    from hybrid_backend.tools.bench.accuracy.store import STOCK, Results
    from hybrid_backend.tools.bench.options import writing

    results = [r for r in Results(out / "results.jsonl").by_key.values() if r.key.model == plan.model]
    results = [r for r in results if r.key.question == plan.question or r.key.method == STOCK]
    if not results:
        return
    report = Report(results)
    text = report.markdown(f"{plan.model}, question {'decoded' if plan.question == 'decode' else 'in the prompt'}")
    console.print(text, markup=False, highlight=False)
    with writing(out):
        (out / "report.md").write_text(text)
        (out / "report.json").write_text(
            report.json({"model": plan.model, "question": plan.question, "dtype": plan.dtype})
        )
        if has_plot:
            report.plot(out / "report.png")


def _methods(text: str | None, in_place: bool) -> list[str]:
    from hybrid_backend.methods import method_names
    from hybrid_backend.tools.bench.accuracy.plan import WITH_REQUEST_BUDGET
    from hybrid_backend.tools.bench.options import parse_names

    if text is None:
        return ["quest"] if in_place else ["dense", "quest", "scout", "hgca", "infinigen", "clo", "headinfer"]
    if in_place:
        return parse_names("--methods", text, "method with --in-place", WITH_REQUEST_BUDGET)
    return parse_names("--methods", text, "method", sorted(method_names()))


def _budgets(text: str, in_place: bool) -> list[float]:
    from hybrid_backend.tools.bench.options import parse_numbers

    budgets = list[float]()
    for item in text.split(","):
        share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", item)
        budget = float(share[1]) / 100 if share else parse_numbers("--budgets", item, int)[0]
        if share and not (in_place and 0 < budget < 1):
            raise ConfigError(f"--budgets: got {item}, expected less than 100%, and --in-place")
        budgets.append(budget)
    return budgets


def _pool(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--host-pool: got {text!r}, expected a size; {str(error) or 'write it as 8GiB'}") from None


def _longbench(folder: Path | None, names: str | None, length: int, directory: str, samples: int) -> list[Task]:
    from hybrid_backend.tools.bench.accuracy import longbench
    from hybrid_backend.tools.bench.accuracy.task import ModelTokenizer
    from hybrid_backend.tools.bench.options import parse_names

    if folder is None:
        if names is not None:
            raise ConfigError(f"--longbench-datasets {names}: give their folder with --longbench too")
        return []
    datasets = parse_names("--longbench-datasets", names or longbench.DEFAULT, "dataset", longbench.DATASETS)
    return longbench.load(folder, datasets, length, ModelTokenizer(directory), samples)
