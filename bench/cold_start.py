"""Start time of `hybrid serve` on a CPU up to the first answer, and decode rate after it, by variant of the defaults.

    python -m bench.cold_start [--variants stock,hybrid,...] [--prompt 1100] [--rounds 5] [--isa avx2]

Each variant starts with empty compilation caches (cold), then once more with the filled ones (warm): seconds until the
server is healthy, and from there to the first token of a prompt. Then all servers are up at once and decode in turns,
so that the machine's noise meets all of them alike. ``stock`` is vLLM's CPU engine with its own defaults.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.decode_cpu import decode_rate
from hybrid_backend.tools.hub import fetch
from tests.engines.server import MODEL, Server, hybrid_server, stock_server
from tests.engines.texts import tokens_of_prose

_EAGER, _COMPILED = ["--enforce-eager"], ["--no-enforce-eager"]
_ALL_CORES, _ONE_RESERVED = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
# Name -> (stock or hybrid, flags, environment).
VARIANTS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "stock": ("stock", [], _ONE_RESERVED),
    "stock fp32": ("stock", ["--dtype", "float32"], _ONE_RESERVED),
    "bf16 compiled": ("hybrid", ["--dtype", "bfloat16", *_COMPILED], _ALL_CORES),
    "fp32 compiled": ("hybrid", ["--dtype", "float32", *_COMPILED], _ALL_CORES),
    "bf16 eager": ("hybrid", ["--dtype", "bfloat16", *_EAGER], _ALL_CORES),
    "fp32 eager": ("hybrid", ["--dtype", "float32", *_EAGER], _ALL_CORES),
    "bf16 eager, one core reserved": ("hybrid", ["--dtype", "bfloat16", *_EAGER], _ONE_RESERVED),
    "fp32 eager, one core reserved": ("hybrid", ["--dtype", "float32", *_EAGER], _ONE_RESERVED),
}
# Makes torch and oneDNN take the code that a CPU without wider registers would run.
_ISA = {"": {}, "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}


def start(stack: ExitStack, name: str, folder: Path, caches: Path, isa: str, memory: int) -> tuple[Server, float]:
    """Start a server of the variant; return it and the seconds that the start took."""
    kind, flags, environment = VARIANTS[name]
    environment = {
        **environment,
        **_ISA[isa],
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
    }
    began = time.perf_counter()
    if kind == "stock":
        flags = [*flags, "--kv-cache-memory-bytes", str(memory)]
        server = stack.enter_context(stock_server(folder, fetch(MODEL), flags, environment))
    else:
        server = stack.enter_context(hybrid_server(folder, {"host_pool.size": memory}, flags, environment=environment))
    return server, time.perf_counter() - began


def first_token(server: Server, tokens: int, seed: int) -> float:
    """Return the seconds from the request to the first token of the answer."""
    began = time.perf_counter()
    server.client().completions.create(model=server.model, prompt=tokens_of_prose(tokens, seed), max_tokens=1)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(name.replace(", ", "/") for name in VARIANTS))
    parser.add_argument("--prompt", type=int, default=1100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--isa", default="", choices=sorted(_ISA))
    parser.add_argument("--memory", type=int, default=2**30, help="bytes of KV memory of each server")
    arguments = parser.parse_args()
    names = [name.replace("/", ", ") for name in arguments.variants.split(",")]
    rows: dict[str, dict[str, float]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as all_servers:
        servers: dict[str, Server] = {}
        for name in names:
            caches = Path(folder) / f"caches{len(servers)}"  # a space in it breaks Inductor's call of the compiler
            caches.mkdir()
            with ExitStack() as alone:
                server, rows[name]["cold start"] = start(
                    alone, name, Path(folder), caches, arguments.isa, arguments.memory
                )
                rows[name]["first token, cold"] = first_token(server, arguments.prompt, 0)
            server, rows[name]["warm start"] = start(
                all_servers, name, Path(folder), caches, arguments.isa, arguments.memory
            )
            rows[name]["first token"] = first_token(server, arguments.prompt, 0)
            servers[name] = server
            print(name, rows[name], flush=True)
        rates: dict[str, list[float]] = {name: [] for name in names}
        prompt = tokens_of_prose(arguments.prompt, 0)
        order = list(names)
        for turn in range(arguments.rounds):
            for name in order:
                first = first_token(servers[name], arguments.prompt, 7919 * (turn + 1))
                rows[name].setdefault("first token", first)
                rates[name].append(decode_rate(servers[name], [prompt], arguments.tokens))
            order.reverse()
        for name in names:
            rows[name]["decode tokens/s"] = statistics.median(rates[name])
    columns = ["cold start", "first token, cold", "warm start", "first token", "decode tokens/s"]
    table = Table("variant", *columns)
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.1f}" for column in columns))
    Console(width=120).print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "cold_start.json").write_text(
        json.dumps({"arguments": vars(arguments), "rows": rows, "rates": rates}, indent=1)
    )


if __name__ == "__main__":
    main()
