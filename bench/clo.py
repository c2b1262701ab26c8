"""CLO's caches on a real model: how often a head keeps its pages, what that costs, by eta and budget.

    python -m bench.clo [--context 1536] [--budgets 240,512] [--etas 1,0.8,0.6]

The engine follows prose token by token (teacher forced) with separate tiers, as on a GPU; layer 0 is exact, no head is
persistent, all have importance 1. Eta 1 selects afresh in every step. Mass is of the dense attention weights, sampled
by the server. Writes bench/out/clo.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.fidelity import follow
from hybrid_backend.tools.bench.fidelity import FIDELITY_FLAGS
from tests.engines.server import Server, hybrid_server
from tests.engines.texts import tokens_of_prose

FLAGS = ("--dtype", "float32", "--max-num-seqs", "2", "--enforce-eager", *FIDELITY_FLAGS)
KEYS: dict[str, Any] = {
    "method": "clo", "sparse": "always", "page_size": 16, "sinks": 1, "recent": 4,
    "exact_layers": [0], "clo.persistent": "none", "host_pool.size": "512MiB", "metrics.sample_interval": 4,
}  # fmt: skip
STARTS, POSITIONS = (0, 20000), 128


def figures(server: Server) -> dict[str, float]:
    """Return hits per lookup, attention mass and copied MB per decoded token, over all layers that leave pages out."""
    lookups, hits = (server.total(f"hybrid_head_{name}_total") for name in ("lookups", "hits"))
    mass = server.metrics("hybrid_attention_mass_recall")["hybrid_attention_mass_recall"]
    per_layer = [
        server.total("hybrid_head_hits_total", {layer}) / server.total("hybrid_head_lookups_total", {layer})
        for layer in map(int, mass)
    ]
    return {
        "hit_ratio": hits / lookups,
        "least": min(per_layer),
        "most": max(per_layer),
        "mass": sum(mass.values()) / len(mass),
        "copied_mb": server.total("hybrid_copied_bytes") / 1e6 / (len(STARTS) * POSITIONS),
    }


def measure(place: Path, context: int, **keys: Any) -> dict[str, float]:
    with hybrid_server(place, {**KEYS, **keys}, FLAGS) as server:
        for start in STARTS:
            follow(server, tokens_of_prose(context, start), tokens_of_prose(POSITIONS, start + context))
        server.complete("One more.", 1)  # the last figures are published
        return figures(server)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--budgets", default="240,512")
    parser.add_argument("--etas", default="1,0.8,0.6")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    table = Table("query", "budget", "eta", "hits per lookup", "least..most layer", "mass", "copied MB/token")
    with tempfile.TemporaryDirectory() as folder:
        for ahead in (False, True):
            for budget in map(int, arguments.budgets.split(",")):
                for eta in map(float, arguments.etas.split(",")):
                    keys = {"budget_tokens": budget, "clo.eta": eta, "lookahead.enabled": ahead}
                    found = measure(Path(folder), arguments.context, **keys)
                    results.append(keys | found)
                    print(results[-1], flush=True)
                    table.add_row(
                        "predicted" if ahead else "true", str(budget), f"{eta:g}", f"{found['hit_ratio']:.2f}",
                        f"{found['least']:.2f}..{found['most']:.2f}", f"{found['mass']:.3f}",
                        f"{found['copied_mb']:.2f}",
                    )  # fmt: skip
    Console(width=110).print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "clo.json").write_text(json.dumps({"arguments": vars(arguments), "results": results}, indent=1))


if __name__ == "__main__":
    main()
