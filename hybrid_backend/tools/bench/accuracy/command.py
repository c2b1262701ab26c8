"""``hybrid bench accuracy``, ready for typer. What it needs is imported when it runs.

The stock engine answers every prompt densely; then one hybrid server per method and budget (separate tiers) answers
the same prompts, and follows the dense answers for its fidelity. With --in-place one hybrid server does all of it.
docs/accuracy.md says how to read what it writes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.console import Console

from hybrid_backend.config import parse_size
from hybrid_backend.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_backend.tools.bench.accuracy.run import Driver, Plan


_OF_SERVERS = ("methods", "budgets", "question", "overrides", "dtype", "host_pool", "in_place", "at_once")
"""Options that say how servers are started, and how fidelity is measured."""


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
        bool, typer.Option("--in-place", help="scout, infinigen: one server, whose requests ask for their budgets")
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
    from hybrid_backend.tools.bench.accuracy.client import Scored
    from hybrid_backend.tools.bench.accuracy.run import Driver, Plan, run_endpoint
    from hybrid_backend.tools.bench.accuracy.tasks import chosen
    from hybrid_backend.tools.bench.output import check_folder
    from hybrid_backend.tools.bench.servers import parse_overrides
    from hybrid_backend.tools.hub import resolve_model
    from hybrid_backend.tools.pictures import can_draw

    console = Console(soft_wrap=True)
    if not minutes >= 0:
        raise ConfigError(f"--minutes: got {minutes}, expected 0 (never) or more")
    if longbench_datasets is not None and longbench_folder is None:
        raise ConfigError(f"--longbench-datasets {longbench_datasets}: give their folder with --longbench too")
    if engine_flags and not engine_flags[0].startswith("-"):
        raise ConfigError(f"{engine_flags[0]}: not an option; flags of the servers' engine go after --")
    if endpoint is not None and (given := [*(engine_flags or ()), *_given(context, _OF_SERVERS)]):
        raise ConfigError(f"{given[0]}: with --endpoint no server is started, and only scores are asked; leave it out")
    plan = Plan(
        model=model,
        directory=resolve_model(model),
        methods=_methods(methods, in_place),
        budgets=_budgets(budgets, in_place),
        tasks=[] if tasks == "none" else chosen(tasks),
        lengths=_numbers("--lengths", lengths),
        samples=samples,
        question=_one_of("--question", question, ("prompt", "decode")),
        dtype=dtype,
        pool=_pool(host_pool),
        in_place=in_place,
        at_once=at_once,
        flags=engine_flags or (),
        overrides=parse_overrides(overrides or ()),
        deadline=time.monotonic() + 60 * minutes if minutes else float("inf"),
    )
    if longbench_folder is not None:
        plan = _with_longbench(plan, longbench_folder, longbench_datasets, longbench_length)
    check_folder(out)
    kind = cast(Literal["completions", "chat"], _one_of("--api", api, ("completions", "chat")))
    scored = None if endpoint is None else Scored.at(endpoint, kind)
    draws = can_draw(console)
    if scored is not None:
        done = run_endpoint(plan, scored, out, console)
    else:
        done = _interruptible(Driver(plan, out, console), console)
    _write(plan, out, console, draws)
    raise typer.Exit(0 if done else 3)


def _given(context: typer.Context, names: Collection[str]) -> list[str]:
    """Those of the options that stand on the command line, as one writes them."""
    sources = {p.opts[0]: context.get_parameter_source(p.name) for p in context.command.params if p.name in names}
    return [flag for flag, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _interruptible(driver: Driver, console: Console) -> bool:
    """Ctrl-C and a plain kill end the run and its server, and keep what there is."""
    from hybrid_backend.tools.bench.servers import ended_in_order

    try:
        with ended_in_order():
            return driver.run()
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return False


def _write(plan: Plan, out: Path, console: Console, draws: bool) -> None:
    from hybrid_backend.tools.bench.accuracy import report
    from hybrid_backend.tools.bench.accuracy.store import Results
    from hybrid_backend.tools.bench.output import writing

    results = [r for r in Results(out / "results.jsonl").all() if r.key.model == plan.model]
    results = [r for r in results if r.key.question == plan.question or r.key.method == "stock"]
    if not results:
        return
    arguments: dict[str, object] = {"model": plan.model, "question": plan.question, "dtype": plan.dtype}
    text = report.markdown(
        results, f"{plan.model}, question {'decoded' if plan.question == 'decode' else 'in the prompt'}"
    )
    console.print(text, markup=False, highlight=False)
    with writing(out):
        (out / "report.md").write_text(text)
        (out / "report.json").write_text(report.as_json(results, arguments))
        if draws:
            report.plot(results, out / "report.png")


def _methods(given: str | None, in_place: bool) -> list[str]:
    from hybrid_backend.methods import method_names
    from hybrid_backend.tools.bench.accuracy.run import ASKED
    from hybrid_backend.tools.bench.accuracy.tasks import listed

    if given is None:
        return ["scout"] if in_place else ["dense", "scout", "hgca", "infinigen", "clo", "headinfer"]
    known = list(ASKED) if in_place else sorted(method_names())
    found = listed("--methods", given)
    for name in found:
        if name not in known:
            there = "in place there are" if in_place else "there are"
            raise ConfigError(f"--methods: no method {name!r}; {there} {', '.join(known)}")
    return found


def _budgets(given: str, in_place: bool) -> list[float]:
    found = list[float]()
    for part in given.split(","):
        share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", part)
        budget = float(share[1]) / 100 if share else _numbers("--budgets", part)[0]
        if share and not (in_place and 0 < budget < 1):
            raise ConfigError(f"--budgets: got {part}, expected less than 100%, and --in-place")
        found.append(budget)
    return found


def _numbers(option: str, given: str) -> list[int]:
    try:
        found = [int(part) for part in given.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: got {given!r}, expected whole numbers separated by commas") from None
    if min(found) < 1:
        raise ConfigError(f"{option}: got {min(found)}, expected positive numbers")
    return found


def _one_of(option: str, given: str, allowed: tuple[str, ...]) -> str:
    if given not in allowed:
        raise ConfigError(f"{option}: got {given!r}, expected {' or '.join(allowed)}")
    return given


def _pool(given: str) -> int:
    try:
        return parse_size(given)
    except ValueError as error:
        raise ConfigError(f"--host-pool: got {given!r}, expected a size; {str(error) or 'write it as 8GiB'}") from None


def _with_longbench(plan: Plan, folder: Path, names: str | None, length: int) -> Plan:
    from hybrid_backend.tools.bench.accuracy import longbench
    from hybrid_backend.tools.bench.accuracy.task import ModelTokenizer
    from hybrid_backend.tools.bench.accuracy.tasks import listed

    length = length or max(plan.lengths)
    datasets = list(longbench.DEFAULT) if names is None else listed("--longbench-datasets", names)
    tasks = longbench.load(folder, datasets, length, ModelTokenizer(plan.directory), plan.samples)
    return replace(plan, external=tasks, external_length=length)
