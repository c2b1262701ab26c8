"""Attention of prompts on the CPU: the native kernel over pages in place against PyTorch's flash attention.

    python -m bench.prompts [--dtype float32] [--threads 2] [--reps 5]
    HYBRID_KERNELS=prompt=avx512 python -m bench.prompts --dtype bfloat16  # another kernel than the chosen one

One layer; "PyTorch" is what serves where the kernel does not: earlier tokens gathered, own tokens attended causally,
the two merged. Candidates take turns; medians of wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from hybrid_backend.attention.prefill import KVBlock, gather_tokens
from hybrid_backend.attention.prompts import TorchPrompts
from hybrid_backend.batch import ModelSpec
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.cpu import operations
from hybrid_backend.kernels.cpu.library import kernel_choices

PAGE = 16
SHAPES = (  # kv_heads, group, head_dim, new tokens, context
    (3, 3, 64, 2048, 2048),
    (3, 3, 64, 2048, 7500),
    (3, 3, 64, 16, 7500),
    (2, 7, 64, 2048, 8192),
    (8, 4, 128, 2048, 4096),
)


def measure(shape: tuple[int, int, int, int, int], dtype: torch.dtype, reps: int) -> tuple[float, float]:
    """Seconds of a call: PyTorch's, ours."""
    kv_heads, group, dim, tokens, context = shape
    rng = torch.Generator().manual_seed(0)
    count, heads, scale = -(-context // PAGE), kv_heads * group, dim**-0.5
    kv = torch.randn(count, kv_heads, 2, PAGE, dim, generator=rng).to(dtype)
    pages = torch.randperm(count, generator=rng).int()
    q, out = torch.randn(tokens, heads, dim, generator=rng).to(dtype), torch.empty(tokens, heads, dim, dtype=dtype)
    k, v = (torch.randn(tokens, kv_heads, dim, generator=rng).to(dtype) for _ in range(2))
    prompts = TorchPrompts(operations, ModelSpec(1, heads, kv_heads, dim, scale, dtype))
    times: tuple[list[float], list[float]] = [], []
    for _ in range(reps + 1):
        began = time.perf_counter()
        own, before = prompts.own(q, k, v, [(0, tokens)])[0], []
        if context > tokens:
            earlier = gather_tokens(kv.flatten(0, 2), pages.long(), kv_heads, 0, context - tokens, q.dtype)
            before = [KVBlock(tuple(range(kv_heads)), *earlier)]
        out[:] = prompts.attend(q, own, before)
        halfway = time.perf_counter()
        cpu.attend_prompt(q, kv, pages, context, scale, None, None, out)
        times[0].append(halfway - began)
        times[1].append(time.perf_counter() - halfway)
    theirs, ours = (statistics.median(each[1:]) for each in times)
    return theirs, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--reps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = {choice.order[0] for choice in kernel_choices() if choice.case[:2] == ("prompt", options.dtype)}
    print(f"{options.dtype}, {options.threads} threads, {', '.join(sorted(kernels))}\n")
    print(
        "| KV heads x group x head_dim | new tokens of context | PyTorch, ms | native, ms | ratio | native, GFLOP/s |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        kv_heads, group, dim, tokens, context = shape
        theirs, ours = measure(shape, getattr(torch, options.dtype), options.reps)
        pairs = tokens * (context - tokens) + tokens * (tokens + 1) / 2
        rate = 4 * kv_heads * group * dim * pairs / ours / 1e9
        row = f"{kv_heads} x {group} x {dim} | {tokens:,} of {context:,} | {theirs * 1e3:.1f} | {ours * 1e3:.1f}"
        print(f"| {row} | {theirs / ours:.2f} | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main()
