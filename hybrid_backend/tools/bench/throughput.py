"""``hybrid bench throughput``, ready for typer. Imports are late, so that the command line starts at once."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench.report import Figures, Row, comparison

if TYPE_CHECKING:
    from hybrid_backend.tools.bench.client import Endpoint
    from hybrid_backend.tools.bench.load import Point, Workload

ROWS = (
    Row("done req/s", "requests_per_second", 2),
    Row("output tok/s", "output_tokens_per_second", 1),
    Row("of the first", "times_first", 2),
    Row("goodput req/s", "good_requests_per_second", 2),
    Row("TTFT median s", "ttft_median", 2, 1e-3),
    Row("TTFT p99 s", "ttft_p99", 2, 1e-3),
    Row("TPOT median ms", "tpot_median", 1),
    Row("TPOT p99 ms", "tpot_p99", 1),
    Row("failed", "failed"),
)


def throughput(
    endpoint: Annotated[
        list[str] | None, typer.Argument(help="NAME=URL of running servers; the first is the reference")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="instead: start stock vLLM and `hybrid serve` with the demo model")
    ] = False,
    rates: Annotated[str, typer.Option(help="requests per second; inf: all at once")] = "0.25,0.5,1,inf",
    prompts: Annotated[int, typer.Option(min=1, help="requests of one run")] = 16,
    input_length: Annotated[int, typer.Option("--input", min=1, help="tokens of a prompt")] = 2048,
    output_length: Annotated[int, typer.Option("--output", min=2, help="tokens of an answer")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="runs at each rate, servers taking turns")] = 3,
    good: Annotated[
        str, typer.Option(help="limits of a good request, in milliseconds: ttft, tpot, e2el")
    ] = "ttft:10000,tpot:250",
    seed: Annotated[int, typer.Option(help="of prompts and arrivals")] = 0,
    client: Annotated[str, typer.Option(help="whose client makes the load: auto, vllm or sglang")] = "auto",
    model: Annotated[str | None, typer.Option(help="the servers' name of it; default: the first they list")] = None,
    tokenizer: Annotated[str, typer.Option(help="folder or hub id; default: the model's name")] = "",
    dtype: Annotated[str, typer.Option(help="of --serve")] = "bfloat16",
    batch: Annotated[int, typer.Option(min=1, help="most requests at once, of --serve")] = 16,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="one configuration key of --serve's hybrid, as budget_tokens=1024")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of throughput.json and logs")] = Path("hybrid-bench"),
) -> None:
    """Sweep request rates over servers, one at a time in turns: throughput, goodput, TTFT, TPOT; compare them.

    The load comes from the engine's own client: `vllm bench serve`, or SGLang's where only SGLang is installed. Every
    server gets the same prompts at the same moments. No prompt is sent twice to one server, so its prefix cache has
    nothing to give.
    """
    from hybrid_backend.tools.bench.load import Workload, installed_client, run_client, sweep
    from hybrid_backend.tools.bench.options import check_out, parse_limits, parse_rates, writing
    from hybrid_backend.tools.bench.servers import DEMO, configured, parse_overrides
    from hybrid_backend.tools.counts import counted

    if serve == bool(endpoint):
        raise ConfigError("give either running servers as NAME=URL, or --serve")
    client, rate_list = installed_client(client), parse_rates("--rates", rates)
    settings, limits = parse_overrides(overrides or ()), parse_limits("--good", good, ("ttft", "tpot", "e2el"))
    if serve:
        configured(DEMO, settings)  # A mistake in --set is told before a server starts.
    check_out(out)
    workload = Workload(prompts, input_length, output_length, limits, tokenizer)
    if serve:
        servers = _start(workload, dtype, batch, settings, out / "logs")
    else:
        servers = _find(endpoint or (), model, workload)
    console = Console(soft_wrap=True, highlight=False)
    with servers as (endpoints, workload):
        run = partial(run_client, client, out / "logs" / "client.log")

        def tell(point: Point) -> None:
            console.print(progress_line(point, repeats), markup=False)

        points = sweep(endpoints, rate_list, repeats, workload, run, seed, tell)
    record = {
        "client": client, "workload": asdict(workload), "seed": seed, "set": settings,
        "dtype": dtype if serve else None, "machine": platform.platform(),
        "points": [point.model_dump() for point in points],
    }  # fmt: skip
    runs = f"{counted(prompts, 'request')} per run, {counted(repeats, 'run')}"
    console.print(table(points, f"{input_length} + {output_length} tokens, {runs}; good: {good}"))
    with writing(out):
        (out / "throughput.json").write_text(json.dumps(record, indent=1))
    console.print(f"written: {out}/throughput.json")


def table(points: Sequence[Point], title: str) -> Table:
    """Return medians over the repeats with their ranges. A ratio to the first endpoint is of two runs of one turn."""
    first = {(point.rate, point.repeat): point for point in points if point.endpoint == points[0].endpoint}
    sections: dict[str, dict[str, dict[str, list[float]]]] = {}
    for point in sorted(points, key=lambda point: math.inf if point.rate is None else point.rate):
        reference = first[point.rate, point.repeat].output_tokens_per_second
        values = {**point.model_dump(), "times_first": point.output_tokens_per_second / reference}
        figures = sections.setdefault(_rate_label(point.rate), {}).setdefault(point.endpoint, {})
        for row in ROWS:
            figures.setdefault(row.key, []).append(values[row.key])
    for endpoints in sections.values():
        for figures in endpoints.values():
            figures["failed"] = [sum(figures["failed"])]
    shown: Mapping[str, Mapping[str, Figures]] = {rate: dict(endpoints) for rate, endpoints in sections.items()}
    return comparison(title, shown, ROWS)


def progress_line(point: Point, repeats: int) -> str:
    """Summarize one run in a line."""
    failed = f", {point.failed} failed" if point.failed else ""
    run = f"{point.endpoint}, {_rate_label(point.rate)}, run {point.repeat + 1} of {repeats}"
    times = f"TTFT {point.ttft_median / 1e3:.2f} s, TPOT {point.tpot_median:.1f} ms"
    return f"{run}: {point.output_tokens_per_second:.1f} tokens/s, {times}{failed}"


def _rate_label(rate: float | None) -> str:
    return "all at once" if rate is None else f"{rate:g} req/s"


@contextmanager
def _find(arguments: Sequence[str], model: str | None, workload: Workload) -> Iterator[tuple[list[Endpoint], Workload]]:
    """Find running servers and the tokenizer of the first one's model."""
    from hybrid_backend.tools.bench.client import find_endpoint
    from hybrid_backend.tools.bench.load import find_tokenizer

    endpoints = [find_endpoint(argument, model, 30) for argument in arguments]
    yield endpoints, replace(workload, tokenizer=find_tokenizer(workload.tokenizer, endpoints[0].model))


@contextmanager
def _start(
    workload: Workload, dtype: str, batch: int, settings: Mapping[str, Any], logs: Path
) -> Iterator[tuple[list[Endpoint], Workload]]:
    """Start stock vLLM and `hybrid serve`, which both run all the time while one of them is measured."""
    from hybrid_backend.engines.cpu_defaults import intel_openmp
    from hybrid_backend.tools.bench.client import Endpoint
    from hybrid_backend.tools.bench.servers import DEMO, hybrid_server, stock_server
    from hybrid_backend.tools.hub import fetch
    from hybrid_backend.tools.plan.model import find_shape

    model = fetch(DEMO)
    shape = find_shape(str(model), "float32")  # the type with the most KV bytes
    length = workload.input_length + workload.output_length + 64
    memory = int(shape.layers * shape.token_bytes * length * batch * 1.1)
    flags = ["--dtype", dtype, "--max-num-seqs", str(batch), "--max-model-len", str(length)]
    # vLLM compiles by default; `hybrid serve` would not on machines with few cores.
    flags += ["--no-enforce-eager"]
    stock = stock_server(logs, model, [*flags, "--kv-cache-memory-bytes", str(memory)], environment=intel_openmp())
    hybrid = hybrid_server(logs, {"host_pool.size": memory, **settings}, flags)
    with stock as first, hybrid as second:
        endpoints = [Endpoint("stock", first.url, first.model), Endpoint("hybrid", second.url, second.model)]
        yield endpoints, replace(workload, tokenizer=workload.tokenizer or str(model))
