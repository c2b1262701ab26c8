"""Decode attention over K and V in 8 bits against the same in the queries' dtype, interleaved.

    python -m bench.kv_bits [--shapes 2x7x64x32,8x4x128x32] [--rows 1 8] [--tokens 32768] [--threads 1 2] [--isa avx2]

One layer of the native decoder attends all pages of its rows. A shape is KV heads x query heads of each x head_dim x
page size. Pages lie in random order in a pool of huge memory pages, and each call reads other pages than the calls
before it, so K and V come from DRAM (``--cached`` reads the same pages again, which shows the arithmetic). The two
formats take turns; printed are medians in milliseconds, their ratio, and the ratio's middle half over the turns. With
one thread the time is the thread's CPU time, otherwise the wall clock. Each number of threads has its own process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from bench.ipex_op import huge_pages
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.kv_format import KvFormat

SHAPES = "2x7x64x32,8x4x128x32,8x2x128x32,3x3x64x16"
Run = Callable[[], float]


def decode_run(kv: KvFormat, group: int, rows: int, tokens: int, threads: int, given: argparse.Namespace) -> Run:
    """Return a function that decodes one layer over pages that were not read for long, and returns seconds."""
    dtype = getattr(torch, given.dtype)
    pages = -(-tokens // kv.page_size)
    calls = 1 if given.cached else max(2, int(given.pool_gb * 2**30) // (rows * pages * kv.page_bytes))
    layer = _pool_of(kv, calls * rows * pages, dtype)
    team = "caller" if threads == 1 else "openmp"
    heads = kv.kv_heads * group
    decoder = cpu.Decoder([layer], {}, heads, kv.head_dim**-0.5, team=team, threads=threads, isa=given.isa, dtype=dtype)
    tables = torch.randperm(calls * rows * pages).view(calls, rows, pages)
    lengths, all_pages = torch.full((rows,), tokens), torch.full((rows,), -1)
    q = torch.randn(rows, heads, kv.head_dim).to(dtype)
    out = torch.empty_like(q)
    clock = time.thread_time if threads == 1 else time.perf_counter
    number = 0

    def run() -> float:
        nonlocal number
        decoder.begin(tables[number % calls], lengths, all_pages)
        number += 1
        begun = clock()
        decoder.layer(0, q, None, None, out)
        return clock() - begun

    return run


def compare(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Let the runs take turns, each round in the other order; return the seconds of each run by name."""
    order = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in order:
            taken = runs[name]()
            if number:  # the first round loads the code
                seconds[name].append(taken)
        order.reverse()
    return seconds


def measure(given: argparse.Namespace, threads: int) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    dtype = getattr(torch, given.dtype)
    for text in given.shapes.split(","):
        kv_heads, group, dim, page = (int(number) for number in text.split("x"))
        for rows in given.rows:
            formats = {name: KvFormat(kv_heads, page, dim, each) for name, each in (("16", dtype), ("8", torch.int8))}
            runs = {name: decode_run(kv, group, rows, given.tokens, threads, given) for name, kv in formats.items()}
            seconds = compare(runs, given.rounds)
            ratios = [a / b for a, b in zip(seconds["16"], seconds["8"], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            wide, narrow = (1e3 * statistics.median(seconds[name]) for name in ("16", "8"))
            print(
                f"{text:12} {threads} thread(s) {rows:2} x {given.tokens:6}  {given.dtype} {wide:8.3f} ms  "
                f"int8 {narrow:8.3f} ms  ratio {wide / narrow:.2f} ({low:.2f}..{high:.2f})",
                flush=True,
            )


def _pool_of(kv: KvFormat, pages: int, dtype: torch.dtype) -> Tensor:
    """Return that many pages of encoded noise on huge memory pages."""
    size = pages * kv.page_bytes
    flat = huge_pages(size / 2**30 + 2**-8).view(torch.uint8)[:size]
    layer = flat.view(kv.dtype).view(kv.shape(pages))
    some = min(pages, 256)
    tokens = some * kv.page_size
    noise = torch.zeros(kv.shape(some), dtype=kv.dtype)
    position = torch.arange(tokens)
    k, v = torch.randn(2, tokens, kv.kv_heads, kv.head_dim).to(dtype)
    kv.write(noise, position // kv.page_size, position % kv.page_size, k, v)
    width = prod(kv.shape(1))
    for begin in range(0, pages, some):
        count = min(some, pages - begin)
        layer.view(-1, width)[begin : begin + count] = noise.view(-1, width)[:count]
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.kv_bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--isa", default=None, choices=cpu.isas(), help="instruction set; default: the fastest here")
    parser.add_argument("--pool-gb", type=float, default=1, help="memory of each format's pages")
    parser.add_argument("--cached", action="store_true", help="read the same pages again and again")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        measure(given, given.child)
        return
    for threads in given.threads:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "bench.kv_bits", *sys.argv[1:], "--child", str(threads)]
        subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
