"""IPEX's paged decode operator, timed by itself in IPEX's own environment. torch, IPEX and the standard library only.

`bench/cpu_attention.py` starts it with the Python that ``HYBRID_IPEX_PYTHON`` names:

    python -m bench.ipex_op THREADS GIGABYTES

Each line of standard input is a JSON object with kv_heads, group, dim, page, rows, pages and jobs: attend that many
jobs of randomly scattered pages. The answer is a line with GB/s of K and V, by CPU time where there is one thread.
"""

from __future__ import annotations

import ctypes as C
import importlib
import json
import sys
import time

import torch
from torch import Tensor

OPTIONS = (None, -1, 1.0, 1.0, -1.0)  # no ALiBi, no sliding window, K and V not scaled, no soft cap


def huge_pages(gigabytes: float) -> Tensor:
    """Return bf16 noise on huge memory pages: 4 KB pages would cost up to a fifth and hide the kernel."""
    size = int(gigabytes * 2**30) >> 20 << 20
    libc = C.CDLL(None, use_errno=True)
    libc.mmap.restype = C.c_void_p
    libc.mmap.argtypes = [C.c_void_p, C.c_size_t, C.c_int, C.c_int, C.c_int, C.c_long]
    huge = 2 << 20
    address = libc.mmap(None, size + huge, 3, 0x22, -1, 0)
    address = (address + huge - 1) // huge * huge
    libc.madvise(C.c_void_p(address), C.c_size_t(size), 14)
    pool = torch.frombuffer((C.c_char * size).from_address(address), dtype=torch.bfloat16)
    noise = torch.randn(1 << 22).bfloat16()
    for start in range(0, pool.numel(), noise.numel()):
        pool[start : start + noise.numel()] = noise[: pool.numel() - start]
    return pool


def rate(flat: Tensor, threads: int, order: dict[str, int]) -> float:
    """Return the GB/s of one order of pages."""
    kv_heads, group, dim, page = (order[name] for name in ("kv_heads", "group", "dim", "page"))
    rows, pages, jobs = (order[name] for name in ("rows", "pages", "jobs"))
    unit = kv_heads * 2 * page * dim
    pool = flat[: flat.numel() // unit * unit].view(-1, kv_heads, 2, page, dim)
    keys, values = pool[:, :, 0], pool[:, :, 1]
    mapping = torch.arange(kv_heads, dtype=torch.int32).repeat_interleave(group)
    lens = torch.full((rows,), pages * page, dtype=torch.int32)
    queries = [torch.randn(rows, kv_heads * group, dim).bfloat16() for _ in range(jobs)]
    tables = torch.randperm(len(pool))[: jobs * rows * pages].view(jobs, rows, pages).int()
    out = torch.empty_like(queries[0])
    clock = time.thread_time if threads == 1 else time.perf_counter
    began = clock()
    for q, table in zip(queries, tables, strict=True):
        torch.ops.torch_ipex.single_query_cached_kv_attention(
            out, q, keys, values, mapping, dim**-0.5, table, lens, page, pages * page, *OPTIONS
        )
    return jobs * rows * pages * unit * 2 / (clock() - began) / 1e9


def main() -> None:
    threads, gigabytes = int(sys.argv[1]), float(sys.argv[2])
    torch.set_grad_enabled(False)
    # IPEX writes notes to standard output when it is imported.
    answers = sys.stdout
    sys.stdout = sys.stderr
    importlib.import_module("intel_extension_for_pytorch")
    torch.set_num_threads(threads)
    flat = huge_pages(gigabytes)
    for line in sys.stdin:
        print(rate(flat, threads, json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
