"""``hybrid bench throughput``, ready for typer. Imports are late, so that the command line starts at once."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hybrid_backend.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_backend.tools.bench.client import Endpoint
    from hybrid_backend.tools.bench.throughput.sweep import Point, Workload


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
    out: Annotated[Path, typer.Option(help="folder of throughput.json, .md and .png")] = Path("hybrid-bench"),
) -> None:
    """Sweep request rates over servers, one at a time in turns: throughput, goodput, TTFT, TPOT; compare them.

    The load comes from the engine's own client: `vllm bench serve`, or SGLang's where only SGLang is installed. Every
    server gets the same prompts at the same moments. No prompt is sent twice to one server, so its prefix cache has
    nothing to give.
    """
    from hybrid_backend.tools.bench.options import check_out, format_limits, parse_choice, parse_limits, parse_numbers
    from hybrid_backend.tools.bench.servers import DEMO, configured, parse_overrides
    from hybrid_backend.tools.bench.throughput.client import CLIENTS, installed_client, run_client
    from hybrid_backend.tools.bench.throughput.report import progress_line
    from hybrid_backend.tools.bench.throughput.sweep import Workload, sweep
    from hybrid_backend.tools.counts import counted
    from hybrid_backend.tools.pictures import can_draw

    if serve == bool(endpoint):
        raise ConfigError("give either running servers as NAME=URL, or --serve")
    parse_choice("--client", client, ("auto", *CLIENTS))
    rate_list, settings = parse_numbers("--rates", rates, float), parse_overrides(overrides or ())
    limits = parse_limits("--good", good, ("ttft", "tpot", "e2el"))
    if serve:
        configured(DEMO, settings)  # A mistake in --set is told before a server starts.
    console, client = Console(), installed_client(client)
    check_out(out)
    workload = Workload(
        prompts=prompts, input_length=input_length, output_length=output_length, goodput=limits, tokenizer=tokenizer
    )
    if serve:
        servers = _start(workload, dtype, batch, settings, out / "logs")
    else:
        servers = _find(endpoint or (), model, workload)
    with servers as (endpoints, workload):
        has_plot = can_draw(console)

        def tell(point: Point) -> None:
            console.print(progress_line(point, repeats), soft_wrap=True, markup=False, highlight=False)

        run = partial(run_client, client, out / "logs" / "client.log")
        points = sweep(endpoints, rate_list, repeats, workload, run, seed, tell)
    runs = f"{counted(prompts, 'request')} per run, {counted(repeats, 'run')}"
    record = {
        "title": f"{input_length} + {output_length} tokens, {runs}; good: {format_limits(limits)}", "client": client,
        "workload": workload.model_dump(), "seed": seed, "set": settings, "dtype": dtype if serve else None,
        "machine": platform.platform(), "points": [point.model_dump() for point in points],
    }  # fmt: skip
    _report(points, record, out, console, has_plot)


def _report(points: Sequence[Point], record: Mapping[str, Any], out: Path, console: Console, has_plot: bool) -> None:
    """Print the table and write the files of the results."""
    from hybrid_backend.tools.bench.options import writing
    from hybrid_backend.tools.bench.throughput.report import plot, screen_table, table

    console.print(screen_table(points))
    with writing(out):
        (out / "throughput.json").write_text(json.dumps(record, indent=1))
        (out / "throughput.md").write_text(f"{record['title']}\n\n{table(points)}")
        if has_plot:
            plot(points, record["title"], out / "throughput.png")
    console.print(f"written: {out}/throughput.json, .md{', .png' if has_plot else ''}", soft_wrap=True)


@contextmanager
def _find(arguments: Sequence[str], model: str | None, workload: Workload) -> Iterator[tuple[list[Endpoint], Workload]]:
    """Find running servers and the tokenizer of the first one's model."""
    from hybrid_backend.tools.bench.client import find_endpoint
    from hybrid_backend.tools.bench.throughput.client import find_tokenizer

    endpoints = [find_endpoint(argument, model, 30) for argument in arguments]
    tokenizer = find_tokenizer(workload.tokenizer, endpoints[0].model)
    yield endpoints, workload.model_copy(update={"tokenizer": tokenizer})


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
        endpoints = [
            Endpoint(name=name, url=server.url, model=server.model)
            for name, server in (("stock", first), ("hybrid", second))
        ]
        yield endpoints, workload.model_copy(update={"tokenizer": workload.tokenizer or str(model)})
