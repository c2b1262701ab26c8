"""Table of all methods on the same prompts: fidelity, device memory, bytes read and copied, waits.

    python -m bench.compare [--methods dense,scout,hgca,infinigen,clo,headinfer] [--context 6900] [--budget 1024]

A stock server gives the dense distributions; then one hybrid server per method follows the same texts (teacher forced)
with separate tiers, as on a GPU: slots, staging and copies are real, though both tiers are RAM here. Per-token
figures are differences between a long and a short answer to the same cached prompt, so prefill is not in them. Writes
bench/out/compare.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.fidelity import follow
from hybrid_backend.config import find_config, load_config
from hybrid_backend.tools.bench.fidelity import FIDELITY_FLAGS, compare
from hybrid_backend.tools.hub import fetch
from hybrid_backend.tools.plan.model import find_shape
from tests.engines.server import MODEL, Server, hybrid_server, stock_server
from tests.engines.texts import tokens_of_prose

FLAGS = ("--dtype", "bfloat16", "--max-num-seqs", "2", "--enforce-eager", *FIDELITY_FLAGS)
POSITIONS, STARTS = 64, (0, 20000)
SHORT, LONG = 8, 72
TOTALS = ("hybrid_cpu_tokens_total", "hybrid_wait_seconds_total", "hybrid_copied_bytes", "hybrid_selected_tokens_total")


def followed(server: Server, context: int) -> list[list[dict[int, float]]]:
    return [follow(server, tokens_of_prose(context, s), tokens_of_prose(POSITIONS, s + context)) for s in STARTS]


def per_token(server: Server, context: int) -> dict[str, float]:
    """Return counters and seconds per decoded token: those of a long answer minus those of a short one."""

    def answer(tokens: int) -> dict[str, float]:
        before = {name: server.total(name) for name in TOTALS}
        started = time.perf_counter()
        server.client().completions.create(
            model=server.model, prompt=tokens_of_prose(context), max_tokens=tokens, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        seconds = time.perf_counter() - started
        time.sleep(0.6)  # metrics are published at most every half second
        server.complete("One more.", 1)
        return {name: server.total(name) - before[name] for name in TOTALS} | {"seconds": seconds}

    answer(2)  # into the prefix cache
    short, long = answer(SHORT), answer(LONG)
    return {name: (long[name] - short[name]) / (LONG - SHORT) for name in short}


def line(server: Server, context: int, dense: list[list[dict[int, float]]], kv_bytes: int) -> dict[str, Any]:
    compared = [compare(a, b) for a, b in zip(dense, followed(server, context), strict=True)]
    mass = server.metrics("hybrid_attention_mass_recall").get("hybrid_attention_mass_recall", {})
    cost = per_token(server, context)
    return {
        "agreement": sum(c.agreement for c in compared) / len(compared),
        "kl": sum(c.kl for c in compared) / len(compared),
        "mass": sum(mass.values()) / len(mass) if mass else 1.0,
        "device_bytes": server.total("hybrid_device_bytes"),
        "context_cache_bytes": server.total("hybrid_context_cache_bytes"),
        "attended_tokens": cost["hybrid_selected_tokens_total"],
        "cpu_bytes": cost["hybrid_cpu_tokens_total"] * kv_bytes,
        "copied_bytes": cost["hybrid_copied_bytes"],
        "wait_seconds": cost["hybrid_wait_seconds_total"],
        "tokens_per_second": 1 / cost["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="dense,scout,hgca,infinigen,clo,headinfer")
    parser.add_argument("--context", type=int, default=6900)
    parser.add_argument("--budget", type=int, default=1024, help="tokens; of hgca the window")
    arguments = parser.parse_args()
    kv_bytes = find_shape(MODEL, "bfloat16").token_bytes
    results: dict[str, dict[str, Any]] = {}
    table = Table(
        "method", "same token", "KL (nats)", "mass", "device MB", "CPU reads MB/token", "copies MB/token",
        "waits ms/token", "tokens/s",
    )  # fmt: skip
    page = load_config(find_config(MODEL)).page_size
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with stock_server(place, fetch(MODEL), [*FLAGS, "--kv-cache-memory-bytes", str(2**30)]) as stock:
            dense = followed(stock, arguments.context)
        for method in arguments.methods.split(","):
            keys: dict[str, Any] = {
                "method": method,
                "budget_tokens": arguments.budget,
                "host_pool.size": "1GiB",
                "metrics.sample_interval": 8,
                "staging_tokens": 64 * page,
                "hgca.window_tokens": arguments.budget,
            }
            with hybrid_server(place, keys, FLAGS) as server:
                row = results[method] = line(server, arguments.context, dense, kv_bytes)
            print(method, row, flush=True)
            table.add_row(
                method, f"{row['agreement']:.3f}", f"{row['kl']:.4f}", f"{row['mass']:.3f}",
                f"{row['device_bytes'] / 1e6:.1f}" if row["device_bytes"] else "in place",
                f"{row['cpu_bytes'] / 1e6:.2f}", f"{row['copied_bytes'] / 1e6:.2f}",
                f"{row['wait_seconds'] * 1e3:.2f}", f"{row['tokens_per_second']:.1f}",
            )  # fmt: skip
    Console(width=140).print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "compare.json").write_text(json.dumps({"arguments": vars(arguments), "methods": results}, indent=1))


if __name__ == "__main__":
    main()
