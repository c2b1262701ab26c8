"""Decode tokens/s of the whole vLLM CPU engine, hybrid against stock: same prompts, same threads, interleaved.

    python -m bench.decode_cpu [--contexts 200,2000,7500] [--batches 1,4,8] [--rounds 5] [--set KEY=VALUE]

Prompts are computed
once and then come from the prefix cache: what is timed is decoding. Prints medians, ratios and their spread, and writes
bench/out/decode_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid_backend.hub import fetch
from tests.engine.server import MODEL, Server, hybrid_server, stock_server
from tests.engine.texts import tokens_of_prose


def decode_rate(server: Server, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second over all prompts at once, from each stream's first token to its last."""

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


def measure(servers: dict[str, Server], context: int, batch: int, rounds: int, tokens: int) -> dict[str, list[float]]:
    prompts = [tokens_of_prose(context, 4000 * i + 7 * context) for i in range(batch)]
    for server in servers.values():
        for prompt in prompts:  # into the prefix cache
            server.client().completions.create(model=server.model, prompt=prompt, max_tokens=1)
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, server in servers.items():
            rates[name].append(decode_rate(server, prompts, tokens))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="200,2000,7500")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--set", action="append", default=[], help="configuration of the hybrid server, KEY=VALUE")
    arguments = parser.parse_args()
    contexts, batches = ([int(x) for x in text.split(",")] for text in (arguments.contexts, arguments.batches))
    flags = ["--dtype", arguments.dtype, "--max-num-seqs", str(max(batches))]
    memory = 24_000 * 4 * max(contexts) * max(batches) // 2  # twice what the demo model's bf16 KV needs
    overrides = dict(item.split("=", 1) for item in arguments.set)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with (
            stock_server(place, fetch(MODEL), [*flags, "--kv-cache-memory-bytes", str(memory)]) as stock,
            hybrid_server(place, {"host_pool.size": memory, **overrides}, flags) as hybrid,
        ):
            servers = {"stock": stock, "hybrid": hybrid}
            for context in contexts:
                for batch in batches:
                    rates = measure(servers, context, batch, arguments.rounds, arguments.tokens)
                    ratios = [h / s for h, s in zip(rates["hybrid"], rates["stock"], strict=True)]
                    results.append({"context": context, "batch": batch, **rates, "ratios": ratios})
                    print(
                        f"context {context} batch {batch}: stock {statistics.median(rates['stock']):.1f} "
                        f"hybrid {statistics.median(rates['hybrid']):.1f} tokens/s, ratio "
                        f"{statistics.median(ratios):.2f}",
                        flush=True,
                    )
    table = Table("context", "batch", "stock tok/s", "hybrid tok/s", "ratio", "ratio min..max")
    for row in results:
        table.add_row(
            str(row["context"]),
            str(row["batch"]),
            f"{statistics.median(row['stock']):.1f}",
            f"{statistics.median(row['hybrid']):.1f}",
            f"{statistics.median(row['ratios']):.2f}",
            f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}",
        )
    Console().print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "decode_cpu.json").write_text(json.dumps({"arguments": vars(arguments), "results": results}, indent=1))


if __name__ == "__main__":
    main()
