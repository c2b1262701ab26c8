"""Fidelity of ScoutAttention to dense attention on the demo model, by budget, with and without recall.

    python -m bench.fidelity_report [--budgets 512,1024,2048] [--context 6900]

One stock server gives the dense answers, then one hybrid server per line of the table follows the same texts. Prints a
table (the one in docs/measurements.md) and writes bench/out/fidelity.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.fidelity import answers, follow, lookups
from hybrid_backend.config import find_config, load_config
from hybrid_backend.tools.bench.fidelity import FIDELITY_FLAGS, compare
from hybrid_backend.tools.hub import fetch
from tests.engines.server import MODEL, Server, hybrid_server, stock_server
from tests.engines.texts import tokens_of_prose

FLAGS = ("--dtype", "bfloat16", "--max-num-seqs", "4", "--enforce-eager", *FIDELITY_FLAGS)
POSITIONS, STEPS, STARTS = 64, 256, (0, 20000)


def followed(server: Server, context: int) -> list[list[dict[int, float]]]:
    return [follow(server, tokens_of_prose(context, s), tokens_of_prose(POSITIONS, s + context)) for s in STARTS]


def found(server: Server, context: int, haystacks: int) -> list[bool]:
    return [answers(server, question) for question in lookups(haystacks, facts=10, tokens=context)]


def long_decode(server: Server, context: int, sparse_layers: set[int]) -> float:
    """Return the CPU's share of the tokens that sparse layers attended over a long answer."""
    names = ("hybrid_cpu_tokens_total", "hybrid_selected_tokens_total")
    before = [server.total(name, sparse_layers) for name in names]
    server.client().completions.create(
        model=server.model, prompt=tokens_of_prose(context), max_tokens=STEPS, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    cpu, selected = (server.total(name, sparse_layers) - value for name, value in zip(names, before, strict=True))
    return cpu / selected if selected else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="512,1024,2048")
    parser.add_argument("--context", type=int, default=6900)
    parser.add_argument("--lines", type=int, default=6, help="only so many lines of the table")
    parser.add_argument("--haystacks", type=int, default=4, help="texts with ten passwords each; 0: no lookups")
    arguments = parser.parse_args()
    base = {"host_pool.size": "1GiB", "metrics.sample_interval": 8}
    lines: dict[str, dict[str, Any]] = {f"budget {b}": {"budget_tokens": int(b)} for b in arguments.budgets.split(",")}
    lines["budget 1024, no recall"] = {"budget_tokens": 1024, "recall.enabled": False}
    lines["budget 1024, partial with the predicted query"] = {
        "budget_tokens": 1024,
        "lookahead.partial_query": "predicted",
    }
    lines["budget 1024, no lookahead, unified"] = {"budget_tokens": 1024, "method": "quest"}
    table = Table("", "KL (nats)", "same token", "mass recall", "cosine", "lookups kept", "CPU share")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with stock_server(place, fetch(MODEL), [*FLAGS, "--kv-cache-memory-bytes", str(2**30)]) as stock:
            dense = followed(stock, arguments.context)
            right = found(stock, arguments.context, arguments.haystacks)
        for name, keys in list(lines.items())[: arguments.lines]:
            with hybrid_server(place, {**base, **keys}, FLAGS) as server:
                results[name] = line(server, arguments, dense, right)
            row = results[name]
            print(name, row, flush=True)
            table.add_row(
                name, f"{row['kl']:.4f}", f"{row['agreement']:.3f}", f"{row['mass']:.3f}", f"{row['cosine']:.3f}",
                f"{row['kept']} of {row['asked']}", f"{row['cpu_share']:.3f}",
            )  # fmt: skip
    Console(width=120).print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "fidelity.json").write_text(json.dumps(results, indent=1))


def line(
    server: Server, arguments: argparse.Namespace, dense: list[list[dict[int, float]]], right: list[bool]
) -> dict[str, Any]:
    context = arguments.context
    compared = [compare(a, b) for a, b in zip(dense, followed(server, context), strict=True)]
    mass = server.metrics("hybrid_attention_mass_recall").get("hybrid_attention_mass_recall", {})
    cosine = server.metrics("hybrid_predicted_query_cosine").get("hybrid_predicted_query_cosine", {})
    exact = {str(layer) for layer in load_config(find_config(MODEL)).exact_layers}
    sparse_mass = [value for layer, value in mass.items() if layer not in exact]
    kept = sum(a and b for a, b in zip(right, found(server, context, arguments.haystacks), strict=True))
    return {
        "kl": sum(c.kl for c in compared) / len(compared),
        "agreement": sum(c.agreement for c in compared) / len(compared),
        "mass": sum(sparse_mass) / len(sparse_mass),
        "worst_layer": min(sparse_mass),
        "cosine": sum(cosine.values()) / len(cosine) if cosine else float("nan"),
        "kept": kept,
        "asked": sum(right),
        "cpu_share": long_decode(server, context, set(range(30)) - set(load_config(find_config(MODEL)).exact_layers)),
    }


if __name__ == "__main__":
    main()
