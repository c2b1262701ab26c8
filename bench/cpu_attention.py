"""CPU attention against the memory: GB/s of K and V read, as a fraction of what the same cores can read at all.

    python -m bench.cpu_attention [--threads 1 2] [--reps 9] [--gb 4] [--out bench/out]

Every candidate attends the same randomly scattered pages of one big pool (huge memory pages, far beyond the caches).
Candidates take turns, in random order, and the medians of all turns are compared; so a noisy machine disturbs all of
them alike. With one thread the time is the thread's CPU time, otherwise the wall clock. Candidates:

    native-<isa>   this package, one entry per instruction set that runs here
    in-cache       the best of them on the same few pages again and again: what arithmetic alone allows
    torch          gather, then scaled_dot_product_attention (the kernel that also gives the LSE)
    vllm           vLLM's own paged decode operator, where vLLM is installed (it gives no LSE)
    ipex           IPEX's, where HYBRID_IPEX_PYTHON names an environment that has it: the operator alone, without LSE,
                   over the same shapes of a pool of its own in a process of its own (`make ipex`, bench/ipex_op.py)

Two thread counts in one process would meet OpenMP's habits, so each count runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.ipex_op import huge_pages
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.cpu import library
from hybrid_backend.kernels.kv_format import KvFormat

PAGE = 32
SHAPES = {  # kv_heads, group, head_dim
    "d128 8 heads x4": (8, 4, 128),
    "d128 8 heads x2": (8, 2, 128),
    "d64 3 heads x3": (3, 3, 64),
}
Run = Callable[[Tensor, Tensor], object]


class Ipex:
    """The process that times IPEX's operator."""

    def __init__(self, python: str, threads: int, gigabytes: float) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "bench.ipex_op", str(threads), str(gigabytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[1],
        )

    @classmethod
    def start(cls, threads: int, gigabytes: float) -> Ipex | None:
        python = os.environ.get("HYBRID_IPEX_PYTHON")
        if not python:
            print("no ipex candidate: HYBRID_IPEX_PYTHON is not set", file=sys.stderr)
            return None
        return cls(python, threads, gigabytes)

    def rate(self, shape: tuple[int, int, int], rows: int, pages: int, jobs: int) -> float:
        """Return the GB/s of one order of pages."""
        assert self._process.stdin is not None and self._process.stdout is not None
        kv_heads, group, dim = shape
        order = {"kv_heads": kv_heads, "group": group, "dim": dim, "page": PAGE}
        print(json.dumps({**order, "rows": rows, "pages": pages, "jobs": jobs}), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Bench:
    """A shape of attention on a number of threads."""

    def __init__(self, flat: Tensor, shape: tuple[int, int, int], threads: int, ipex: Ipex | None) -> None:
        self.kv_heads, self.group, self.dim = self.shape = shape
        self.ipex = ipex
        self.threads = threads
        kv = KvFormat(self.kv_heads, PAGE, self.dim, flat.dtype)
        self.pages, self.page_bytes = flat.nbytes // kv.page_bytes, kv.page_bytes
        self.pool = flat[: math.prod(kv.shape(self.pages))].view(kv.shape(self.pages))
        self.scale = self.dim**-0.5
        self._order = torch.randperm(self.pages)
        self._next = 0

    def take(self, rows: int, k: int) -> Tensor:
        """Return ``[rows, k]`` page ids that were not read for long."""
        if self._next + rows * k > self.pages:
            self._next = 0
        self._next += rows * k
        return self._order[self._next - rows * k : self._next].view(rows, k)

    def candidates(self, rows: int, k: int) -> Iterator[tuple[str, Run]]:
        for isa in cpu.isas():
            if isa != "generic":
                yield f"native-{isa}", self._native(isa, rows, k)
        yield "torch", self._torch(rows, k)
        vllm = self._vllm(rows, k)
        if vllm is not None:
            yield "vllm", vllm

    def _native(self, isa: str, rows: int, k: int) -> Run:
        valid = torch.full((rows, 1, k), PAGE)
        if self.threads == 1:
            return lambda q, ids: cpu.partial(q, self.pool, ids[:, None], valid, self.scale, isa=isa)
        pool = cpu.Pool(self.threads - 1, isa=isa)
        # The caller is one of the threads, as in the operators that this is compared with.
        return lambda q, ids: pool.submit(q, self.pool, ids[:, None], valid, self.scale).wait(60, help=True)

    def _torch(self, rows: int, k: int) -> Run:
        blocks = self.pool.flatten(0, 2)
        heads = torch.arange(self.kv_heads)[None, :, None]

        def run(q: Tensor, ids: Tensor) -> object:
            index = (ids[:, None] * self.kv_heads + heads).flatten() * 2
            gathered = blocks.index_select(0, torch.cat([index, index + 1]))
            keys, values = gathered.view(2, rows, self.kv_heads, k * PAGE, self.dim)
            grouped = q.view(rows, self.kv_heads, self.group, self.dim)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(grouped, keys, values, scale=self.scale)

        return run

    def _vllm(self, rows: int, k: int) -> Run | None:
        try:
            from vllm.platforms import current_platform

            current_platform.import_kernels()
            ops = torch.ops._C
            lens = torch.full((rows,), k * PAGE, dtype=torch.int32)
            starts = torch.arange(rows + 1, dtype=torch.int32)
            heads = self.kv_heads * self.group
            out = torch.empty(rows, heads, self.dim, dtype=torch.bfloat16)
            isa = "amx" if "amx" in cpu.isas() else "vec"
            plan = ops.get_scheduler_metadata(
                rows, heads, self.kv_heads, self.dim, lens, torch.bfloat16, starts, True, -1, isa, True, None, "auto"
            )
            keys, values = self.pool.view(self.pages, self.kv_heads, 2 * PAGE, self.dim).chunk(2, 2)

            def run(q: Tensor, ids: Tensor) -> object:
                ops.cpu_attention_with_kv_cache(
                    q, keys, values, out, starts, lens, self.scale, True, None, -1, ids.int(), 0.0, plan, None, None,
                    1.0, 1.0, "auto",
                )  # fmt: skip
                return out

            run(torch.zeros(rows, heads, self.dim).bfloat16(), self.take(rows, k))
            return run
        except (ImportError, AttributeError, RuntimeError, TypeError) as error:
            print(f"no vllm candidate: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            return None

    def read_rate(self, megabytes: int = 256) -> float:
        """Return the GB/s of sequential reads from a random place, over all threads together."""
        flat = self.pool.view(-1)
        share = min(megabytes << 20, flat.nbytes // (2 * self.threads)) // 4096 * 4096
        starts = [random.randrange(0, (flat.nbytes - share) // 4096) * 4096 for _ in range(self.threads)]
        native = library.native()

        def read(start: int) -> None:
            native.hb_read(flat.data_ptr() + start, share)

        others = [threading.Thread(target=read, args=(start,)) for start in starts[1:]]
        begun = self._clock()
        for other in others:
            other.start()
        read(starts[0])
        for other in others:
            other.join()
        return share * self.threads / (self._clock() - begun) / 1e9

    def _clock(self) -> float:
        return time.thread_time() if self.threads == 1 else time.perf_counter()

    def compare(self, rows: int, tokens: int, reps: int) -> dict[str, float]:
        """Return the median GB/s by candidate, and of the roofline."""
        k = tokens // PAGE
        runs = dict(self.candidates(rows, k))
        job_bytes = rows * k * self.page_bytes
        inner = max(1, (48 << 20) // job_bytes)
        heads = self.kv_heads * self.group
        rates: dict[str, list[float]] = {name: [] for name in [*runs, "in-cache", "roofline"]}
        few = self._order[: max(1, (256 << 10) // self.page_bytes)]
        cached = few.repeat(rows * k // len(few) + 1)[: rows * k].view(rows, k)
        if self.ipex:
            rates["ipex"] = []
        for _ in range(reps):
            for name in random.sample(list(rates), len(rates)):
                if name == "roofline":
                    rates[name].append(self.read_rate())
                    continue
                if self.ipex and name == "ipex":
                    rates[name].append(self.ipex.rate(self.shape, rows, k, inner))
                    continue
                is_cached = name == "in-cache"
                jobs = [
                    (torch.randn(rows, heads, self.dim).bfloat16(), cached if is_cached else self.take(rows, k).clone())
                    for _ in range(inner)
                ]
                run = runs[f"native-{cpu.isas()[0]}" if is_cached else name]
                begun = self._clock()
                for q, ids in jobs:
                    run(q, ids)
                rates[name].append(job_bytes * inner / (self._clock() - begun) / 1e9)
        return {name: statistics.median(values) for name, values in rates.items()}


def measure(threads: int, gigabytes: float, reps: int, cases: list[tuple[int, int]], shapes: list[str]) -> list[dict]:
    torch.set_num_threads(threads)
    results = []
    flat = huge_pages(gigabytes)
    ipex = Ipex.start(threads, gigabytes)
    for shape in shapes:
        bench = Bench(flat, SHAPES[shape], threads, ipex)
        for rows, tokens in cases:
            rates = bench.compare(rows, tokens, reps)
            results.append({"shape": shape, "threads": threads, "rows": rows, "tokens": tokens, "gbps": rates})
            shown = "  ".join(f"{name} {rate:5.1f}" for name, rate in rates.items())
            best = max(rate for name, rate in rates.items() if name.startswith("native"))
            print(
                f"{shape:16} {threads} thr {rows:2}x{tokens:4}  {shown}  | {best / rates['roofline']:.0%}", flush=True
            )
    if ipex:
        ipex.close()
    return results


def plot(results: list[dict], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = sorted({(r["shape"], r["threads"]) for r in results})
    figure, axes = pyplot.subplots(len(groups), 1, figsize=(9, 3 * len(groups)), squeeze=False)
    for axis, (shape, threads) in zip(axes[:, 0], groups, strict=True):
        mine = [r for r in results if (r["shape"], r["threads"]) == (shape, threads)]
        names = list(mine[0]["gbps"])
        for i, name in enumerate(names):
            axis.bar([x + 0.8 * i / len(names) for x in range(len(mine))], [r["gbps"][name] for r in mine],
                     0.8 / len(names), label=name)  # fmt: skip
        axis.set_xticks([x + 0.3 for x in range(len(mine))], [f"{r['rows']}x{r['tokens']}" for r in mine])
        axis.set_ylabel("GB/s of K and V")
        axis.set_title(f"{shape}, {threads} thread(s): sequences x tokens")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    cases = [(rows, tokens) for rows in options.rows for tokens in options.tokens]
    if options.child:
        results = measure(options.child, options.gb, options.reps, cases, options.shapes)
        (options.out / f"part-{options.child}.json").write_text(json.dumps(results))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    everything: list[dict] = []
    for threads in options.threads:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "bench.cpu_attention", *sys.argv[1:], "--child", str(threads)]
        subprocess.run(command, check=True, env=environment)
        part = options.out / f"part-{threads}.json"
        everything += json.loads(part.read_text())
        part.unlink()
    report = {"machine": platform.machine(), "isas": cpu.isas(), "cpus": os.cpu_count(), "results": everything}
    (options.out / "cpu_attention.json").write_text(json.dumps(report, indent=1))
    plot(everything, options.out / "cpu_attention.png")


if __name__ == "__main__":
    main()
