"""The command line; the package's docstring says what it does."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import yaml
from rich.console import Console
from rich.markdown import Markdown

import bench.throughput
from bench.throughput.client import CLIENTS, Endpoint, installed_client, run_client
from bench.throughput.point import Workload
from bench.throughput.report import plot, table
from bench.throughput.sweep import sweep
from hybrid_backend.tools.bench.client import served_models

OUT = Path(__file__).parents[1] / "out"


def arguments_of(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.throughput",
        description=bench.throughput.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--endpoint", action="append", default=[], metavar="NAME=URL", help="a running server")
    parser.add_argument("--serve", action="store_true", help="start stock vLLM and `hybrid serve` with the demo model")
    parser.add_argument("--rates", default="0.25,0.5,1,inf", help="requests per second; inf: all at once")
    parser.add_argument("--prompts", type=int, default=16, help="requests of one run")
    parser.add_argument("--input", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--goodput", default="ttft:10000,tpot:250", help="limits in milliseconds: ttft, tpot, e2el")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--client", choices=["auto", *CLIENTS], default="auto")
    parser.add_argument("--model", default="", help="the endpoints' name of the model; default: the first they list")
    parser.add_argument("--tokenizer", default="", help="folder or hub id; default: the model's name")
    parser.add_argument("--dtype", default="bfloat16", help="of --serve")
    parser.add_argument("--batch", type=int, default=16, help="most requests at once, of --serve")
    parser.add_argument("--set", action="append", default=[], help="configuration of --serve's hybrid, KEY=VALUE")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of throughput.json, .md and .png")
    arguments = parser.parse_args(line)
    if arguments.serve == bool(arguments.endpoint):
        parser.error("give either --serve or at least one --endpoint NAME=URL")
    if bad := [item for item in arguments.endpoint if not all(item.partition("="))]:
        parser.error(f"--endpoint {bad[0]}: write NAME=URL")
    if arguments.client == "auto":
        arguments.client = installed_client()
        if arguments.client is None:
            parser.error("neither vLLM nor SGLang is installed here; their clients make the load")
    try:
        arguments.rates = [float(rate) for rate in arguments.rates.split(",")]
        arguments.goodput = {k: float(v) for k, v in (item.split(":") for item in arguments.goodput.split(","))}
        overrides = (item.split("=", 1) for item in arguments.set)
        arguments.set = {key: yaml.safe_load(value) for key, value in overrides}
    except ValueError as error:
        parser.error(f"--rates, --goodput or --set: {error}")
    if min(arguments.rates) <= 0 or set(arguments.goodput) - {"ttft", "tpot", "e2el"}:
        parser.error("--rates are above zero; --goodput knows ttft, tpot and e2el")
    return arguments


def given(items: Sequence[str], model: str, tokenizer: str) -> list[Endpoint]:
    found = []
    for name, _, url in (item.partition("=") for item in items):
        base = url.rstrip("/").removesuffix("/v1")
        served = model or served_models(name, base, 30)[0]
        found.append(Endpoint(name, base, served, tokenizer or served))
    return found


@contextmanager
def started(arguments: argparse.Namespace) -> Iterator[list[Endpoint]]:
    """Stock vLLM and `hybrid serve`, both up the whole time, of which one is asked at a time."""
    from hybrid_backend.tools.hub import fetch
    from tests.engines.server import MODEL, hybrid_server, stock_server

    model = fetch(MODEL)
    shape = json.loads((model / "config.json").read_text())
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    token = shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * 2 * 4  # bytes of KV, in fp32
    length = arguments.input + arguments.output + 64
    memory = int(token * length * arguments.batch * 1.1)
    flags = ["--dtype", arguments.dtype, "--max-num-seqs", str(arguments.batch), "--max-model-len", str(length)]
    flags += ["--no-enforce-eager"]  # stock's default, on machines of few cores too
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        stock = stock_server(place, model, [*flags, "--kv-cache-memory-bytes", str(memory)])
        hybrid = hybrid_server(place, {"host_pool.size": memory, **arguments.set}, flags)
        with stock as first, hybrid as second:
            yield [
                Endpoint("stock", first.url, MODEL, str(model)),
                Endpoint("hybrid", second.url, MODEL, str(model)),
            ]


@contextmanager
def endpoints_for(arguments: argparse.Namespace) -> Iterator[list[Endpoint]]:
    if not arguments.serve:
        yield given(arguments.endpoint, arguments.model, arguments.tokenizer)
        return
    with started(arguments) as endpoints:
        yield endpoints


def main(line: Sequence[str] | None = None) -> None:
    arguments = arguments_of(line)
    workload = Workload(
        prompts=arguments.prompts,
        input_length=arguments.input,
        output_length=arguments.output,
        goodput=arguments.goodput,
    )
    with endpoints_for(arguments) as endpoints:
        run = partial(run_client, arguments.client)
        tell = partial(print, flush=True)
        points = sweep(endpoints, arguments.rates, arguments.repeats, workload, run, arguments.seed, tell)
    # The first endpoint given is the one that others are compared with, whoever was measured first.
    order = [endpoint.name for endpoint in endpoints]
    points.sort(key=lambda point: order.index(point.endpoint))
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in arguments.goodput.items())
    title = (
        f"{arguments.input} + {arguments.output} tokens, {arguments.prompts} requests per run, "
        f"{arguments.repeats} runs; goodput: {limits}"
    )
    written = table(points)
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"arguments": vars(arguments), "machine": platform.platform(), "points": [p.model_dump() for p in points]}
    (arguments.out / "throughput.json").write_text(json.dumps(record, indent=1, default=str))
    (arguments.out / "throughput.md").write_text(f"{title}\n\n{written}")
    plot(points, title, arguments.out / "throughput.png")
    Console(width=170).print(Markdown(written))
    print(f"written: {arguments.out}/throughput.json, .md, .png")


if __name__ == "__main__":
    main()
