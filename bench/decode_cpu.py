"""Decode tokens/s of a whole CPU engine, hybrid against stock: same prompts, same threads, interleaved.

    python -m bench.decode_cpu [--contexts 200,2000,7500] [--batches 1,4,8] [--set KEY=VALUE] [--other KEY=VALUE]
    python -m bench.decode_cpu --shape qwen3-0.6b --contexts 200,16000,32000 --batches 1,2 --set exact_layers=[0,1,2]
    python -m bench.decode_cpu --engine sglang --contexts 200,2000,7000 --batches 1,4

Stock is vLLM's own CPU backend, or SGLang's torch_native; with ``--other`` a second hybrid server takes its turns.
Prompts are computed once and then come from the prefix cache: what is timed is decoding. ``--shape`` (vLLM only) takes
random weights and a KV cache full of random numbers instead of a prefill (bench/shapes.py). Prints medians, ratios and
their spread, the share of attention in the stock step (from its rate at the shortest context), the ratio that it allows
(`bound`: bytes of KV and digests read, over all layers, against all KV), and writes bench/out/decode_cpu*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from bench.peers.measure import REST
from hybrid_backend.config import HybridConfig, apply_overrides, config_from_mapping, find_config, load_mapping
from hybrid_backend.engines.cpu_defaults import intel_openmp
from hybrid_backend.tools.hub import fetch
from hybrid_backend.tools.plan.model import find_shape
from tests.engines.server import MODEL, Server, hybrid_server, stock_server
from tests.engines.sglang import server as sglang
from tests.engines.texts import tokens_of_prose


@contextmanager
def all_servers(
    engine: str, place: Path, model: Path, flags: list[str], memory: int, tokens: int, ours: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Server]]:
    """Start the stock backend and the hybrid servers of ``ours``, which has configuration overrides by name.

    Each server has a KV memory of ``memory`` bytes or ``tokens`` tokens.
    """
    if engine == "sglang":
        stock_flags = ["--device", "cpu", "--attention-backend", "torch_native", "--page-size", str(sglang.PAGE)]
        stock_flags += ["--max-total-tokens", str(tokens), "--sleep-on-idle"]
        stock = sglang.sglang_server(place, model, [*stock_flags, *flags])
        start = partial(sglang.hybrid_server, flags=flags, model=str(model))
    else:
        flags = [*flags, "--no-enforce-eager"]  # stock's default, on machines of few cores too
        stock_flags = [*flags, "--kv-cache-memory-bytes", str(memory)]
        stock = stock_server(place, model, stock_flags, intel_openmp())
        start = partial(hybrid_server, flags=flags, model=str(model))
    with ExitStack() as started:
        servers = {"stock": started.enter_context(stock)}
        for name, overrides in ours.items():
            folder = place / name
            folder.mkdir()
            servers[name] = started.enter_context(start(folder, {"host_pool.size": memory, **overrides}))
        yield servers


def decode_rate(server: Server, prompts: list[list[int]], tokens: int) -> float:
    """Return the tokens per second over all prompts at once, from each stream's first token to its last."""

    def stream(prompt: list[int]) -> float:
        body: dict[str, Any] = {"ignore_eos": True}
        first = last = 0.0
        for event in server.client().completions.create(
            model=server.model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body=body
        ):
            if event.choices:
                last = time.perf_counter()
                first = first or last
        return (last - first) / (tokens - 1)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return len(prompts) / statistics.median(pool.map(stream, prompts))


def measure(
    servers: dict[str, Server], context: int, batch: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    prompts = [tokens_of_prose(context, 4000 * i + 7 * context) for i in range(batch)]
    for server in servers.values():
        for prompt in prompts:  # into the prefix cache
            server.client().completions.create(model=server.model, prompt=prompt, max_tokens=1)
    rates: dict[str, list[float]] = {name: [] for name in servers}
    order = list(servers.items())
    for _ in range(arguments.rounds):
        for name, server in order:
            time.sleep(REST)
            rates[name].append(decode_rate(server, prompts, arguments.tokens))
        order.reverse()  # whatever else the machine does in turns must not meet the same server each time
    return rates


def allowed_ratio(config: HybridConfig, layers: int, context: int, share: float) -> float:
    """Return Amdahl's bound for attention at equal bytes per second: stock's bytes over the bytes read here."""
    digests = 2 / config.page_size / 2 / 2  # of K and V: max and min of K only, one byte instead of two
    sparse = min(1.0, config.budget_tokens / context + digests) if context > config.budget_tokens else 1.0
    exact = len(config.for_layers([None] * layers).exact_layers) / layers
    return 1 / (1 - share * (1 - exact - (1 - exact) * sparse))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="200,2000,7500")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--shape", default="", help="a key of bench.shapes.SHAPES instead of the demo model")
    parser.add_argument("--set", action="append", default=[], help="configuration of the hybrid server, KEY=VALUE")
    parser.add_argument("--other", action="append", default=[], help="of a second hybrid server, beside --set")
    arguments = parser.parse_args()
    contexts, batches = ([int(x) for x in text.split(",")] for text in (arguments.contexts, arguments.batches))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model, flags = fetch(MODEL), ["--dtype", arguments.dtype]
        if arguments.shape:
            from bench import shapes

            os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # the servers import bench.shapes
            model = shapes.write_shape(arguments.shape, place)
            flags += shapes.FLAGS
        shape = find_shape(str(model), arguments.dtype)
        layers, kv_bytes = shape.layers, shape.layers * shape.token_bytes
        tokens = int((max(contexts) + 256) * max(batches) * 1.1)
        mapping = apply_overrides(load_mapping(find_config(str(model))), arguments.set)
        config = config_from_mapping(mapping, "bench")
        ours = {"hybrid": read(arguments.set)}
        if arguments.other:
            ours["other"] = read([*arguments.set, *arguments.other])
        is_sglang = arguments.engine == "sglang"
        flags += ["--context-length" if is_sglang else "--max-model-len", str(max(contexts) + 256)]
        flags += ["--max-running-requests" if is_sglang else "--max-num-seqs", str(max(batches))]
        with all_servers(arguments.engine, place, model, flags, kv_bytes * tokens, tokens, ours) as servers:
            for context in contexts:
                for batch in batches:
                    rates = measure(servers, context, batch, arguments)
                    results.append(summary(context, batch, rates, results, config, layers))
                    print(results[-1], flush=True)
    heads = ("context", "batch", "stock tok/s", "hybrid tok/s", "ratio", "min..max", "attention share", "bound")
    table = Table(*heads, *(["other / hybrid"] if arguments.other else []))
    for row in results:
        table.add_row(
            str(row["context"]), str(row["batch"]), f"{statistics.median(row['stock']):.1f}",
            f"{statistics.median(row['hybrid']):.1f}", f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}", f"{row['share']:.0%}", f"{row['bound']:.2f}",
            *([f"{row['other_ratio']:.3f}"] if arguments.other else []),
        )  # fmt: skip
    Console(width=110).print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    name = "_".join(["decode_cpu", *filter(None, [arguments.shape, "sglang" if is_sglang else ""])]) + ".json"
    (out / name).write_text(json.dumps({"arguments": vars(arguments), "results": results}, indent=1))


def read(settings: list[str]) -> dict[str, Any]:
    return {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in settings)}


def summary(
    context: int,
    batch: int,
    rates: dict[str, list[float]],
    earlier: list[dict[str, Any]],
    config: HybridConfig,
    layers: int,
) -> dict[str, Any]:
    ratios = [h / s for h, s in zip(rates["hybrid"], rates["stock"], strict=True)]
    others = [o / h for o, h in zip(rates.get("other", ()), rates["hybrid"], strict=False)]
    shortest = next((row["stock"] for row in earlier if row["batch"] == batch), rates["stock"])
    share = max(0.0, 1 - statistics.median(rates["stock"]) / statistics.median(shortest))
    return {
        "context": context,
        "batch": batch,
        **rates,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        **({"other_ratio": statistics.median(others)} if others else {}),
        "share": share,
        "bound": allowed_ratio(config, layers, context, share),
    }


if __name__ == "__main__":
    main()
