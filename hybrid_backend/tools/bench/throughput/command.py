"""``hybrid bench throughput``, ready for typer. What it needs is imported when it runs."""

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
    from hybrid_backend.tools.bench.throughput.point import Workload


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
    from hybrid_backend.tools.bench.limits import parse_limits, told
    from hybrid_backend.tools.bench.output import check_folder, writing
    from hybrid_backend.tools.bench.servers import DEMO, configured, parse_overrides
    from hybrid_backend.tools.bench.throughput.client import CLIENTS, installed_client, run_client
    from hybrid_backend.tools.bench.throughput.point import Point, Workload
    from hybrid_backend.tools.bench.throughput.report import plot, progress_line, summary, table
    from hybrid_backend.tools.bench.throughput.sweep import sweep
    from hybrid_backend.tools.counts import counted
    from hybrid_backend.tools.pictures import can_draw

    if serve == bool(endpoint):
        raise ConfigError("give either running servers as NAME=URL, or --serve")
    if client not in ("auto", *CLIENTS):
        raise ConfigError(f"--client {client}: write auto, {' or '.join(CLIENTS)}")
    asked, changed = _rates(rates), parse_overrides(overrides or ())
    limits = parse_limits("--good", good, ("ttft", "tpot", "e2el"))
    if serve:
        configured(DEMO, changed)  # before anything is started
    console = Console()
    client = installed_client(client)
    check_folder(out)
    workload = Workload(
        prompts=prompts, input_length=input_length, output_length=output_length, goodput=limits, tokenizer=tokenizer
    )
    if serve:
        found = _started(workload, dtype, batch, changed, out / "logs")
    else:
        found = _given(endpoint or (), model, workload)
    with found as (endpoints, workload):
        draws = can_draw(console)

        def tell(point: Point) -> None:
            console.print(progress_line(point, repeats), soft_wrap=True, markup=False, highlight=False)

        run = partial(run_client, client, out / "logs" / "client.log")
        points = sweep(endpoints, asked, repeats, workload, run, seed, tell)
    # The first endpoint given is the one that others are compared with, whoever was measured first.
    order = [each.name for each in endpoints]
    points.sort(key=lambda point: order.index(point.endpoint))
    runs = f"{counted(prompts, 'request')} per run, {counted(repeats, 'run')}"
    title = f"{input_length} + {output_length} tokens, {runs}; good: {told(limits)}"
    written = table(points)
    console.print(summary(points))
    record = {
        "title": title, "client": client, "workload": workload.model_dump(), "seed": seed, "set": changed,
        "dtype": dtype if serve else None, "machine": platform.platform(),
        "points": [point.model_dump() for point in points],
    }  # fmt: skip
    with writing(out):
        (out / "throughput.json").write_text(json.dumps(record, indent=1))
        (out / "throughput.md").write_text(f"{title}\n\n{written}")
        if draws:
            plot(points, title, out / "throughput.png")
    console.print(f"written: {out}/throughput.json, .md{', .png' if draws else ''}", soft_wrap=True)


def _rates(given: str) -> list[float]:
    try:
        found = [float(rate) for rate in given.split(",")]
    except ValueError:
        found = []
    if not found or not all(rate > 0 for rate in found):
        raise ConfigError(f"--rates {given}: write numbers above zero or inf, separated by commas")
    return found


@contextmanager
def _given(named: Sequence[str], model: str | None, workload: Workload) -> Iterator[tuple[list[Endpoint], Workload]]:
    from hybrid_backend.tools.bench.client import find_endpoint
    from hybrid_backend.tools.bench.throughput.tokenizer import find_tokenizer

    endpoints = [find_endpoint(name, model, 30) for name in named]
    tokenizer = find_tokenizer(workload.tokenizer, endpoints[0].model)
    yield endpoints, workload.model_copy(update={"tokenizer": tokenizer})


@contextmanager
def _started(
    workload: Workload, dtype: str, batch: int, changed: Mapping[str, Any], logs: Path
) -> Iterator[tuple[list[Endpoint], Workload]]:
    """Stock vLLM and `hybrid serve`, both up the whole time, of which one is asked at a time."""
    from hybrid_backend.engines.cpu_defaults import intel_openmp
    from hybrid_backend.tools.bench.client import Endpoint
    from hybrid_backend.tools.bench.servers import DEMO, hybrid_server, stock_server
    from hybrid_backend.tools.hub import fetch
    from hybrid_backend.tools.plan.model import find_shape

    model = fetch(DEMO)
    shape = find_shape(str(model), "float32")  # the most that KV may take
    length = workload.input_length + workload.output_length + 64
    memory = int(shape.layers * shape.token_bytes * length * batch * 1.1)
    flags = ["--dtype", dtype, "--max-num-seqs", str(batch), "--max-model-len", str(length)]
    flags += ["--no-enforce-eager"]  # stock's default, on machines of few cores too
    stock = stock_server(logs, model, [*flags, "--kv-cache-memory-bytes", str(memory)], environment=intel_openmp())
    hybrid = hybrid_server(logs, {"host_pool.size": memory, **changed}, flags)
    with stock as first, hybrid as second:
        servers = {"stock": first, "hybrid": second}
        yield (
            [Endpoint(name=name, url=each.url, model=each.model) for name, each in servers.items()],
            workload.model_copy(update={"tokenizer": workload.tokenizer or str(model)}),
        )
