"""Rates of the device tier's kernels on a GPU, and of attention of prompts by PyTorch and by FlashInfer.

A kernel's bytes per second are compared with the copy rates of the same run; attention of prompts is in floating point
operations per second.

    python -m bench.gpu_kernels [--context 32768] [--batches 1,8,40] [--budget 2048] [--chunk 2048]

Shapes of Qwen3-14B (40 heads, 8 KV heads of 128, pages of 32). Rates: device memory by a copy on the device, the bus by
a copy from pinned memory. Writes bench/out/gpu_kernels.json. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hybrid_backend.attention.flashinfer import FlashInfer
from hybrid_backend.attention.partial import Partial
from hybrid_backend.attention.prefill import KVBlock
from hybrid_backend.attention.prompts import Prompts, TorchPrompts
from hybrid_backend.batch import ModelSpec
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.kernels.triton import operations as kernels

HEADS, KV_HEADS, DIM, PAGE = 40, 8, 128, 32
ROUNDS, CALLS = 5, 20
ASLEEP = 10_000_000  # cycles: longer than the host needs to launch the calls of a round
STAGED = 4096  # tokens of a staging buffer
MODEL = ModelSpec(1, HEADS, KV_HEADS, DIM, DIM**-0.5, torch.bfloat16)


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call: the median of a few rounds of `CALLS` calls without gaps.

    The host launches the calls while the device still sleeps.
    """
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(ASLEEP)
        began.record()
        for _ in range(CALLS):
            call()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3 / CALLS)
    return sorted(times)[ROUNDS // 2]


def rates() -> dict[str, float]:
    """Return the bytes per second of copies on the device (read plus written) and over the bus."""
    size = 1 << 28
    here, there = (torch.empty(size, dtype=torch.int8, device="cuda") for _ in range(2))
    pinned = torch.empty(size, dtype=torch.int8, pin_memory=True)
    return {
        "device": 2 * size / seconds(lambda: there.copy_(here)),
        "bus": size / seconds(lambda: here.copy_(pinned, non_blocking=True)),
    }


def flashinfer() -> FlashInfer | None:
    """Return FlashInfer, or None after printing the reason if it cannot be used here."""
    found = FlashInfer.try_create(cast(Operations, kernels), MODEL, torch.device("cuda"))
    if isinstance(found, str):
        print(f"FlashInfer is left out: {found}")
        return None
    return found


def measure_prompts(chunk: int, other: FlashInfer | None) -> dict[str, tuple[float, float]]:
    """Measure one layer by PyTorch and by FlashInfer: ``{name: (operations, or bytes over the bus, seconds)}``."""
    cuda: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = torch.randn(chunk, HEADS, DIM, **cuda), torch.randn(chunk, KV_HEADS, DIM, **cuda)
    staged = torch.randn(KV_HEADS, 2, STAGED, DIM, **cuda)
    block = KVBlock(tuple(range(KV_HEADS)), *staged.unbind(1))
    flops = 4 * HEADS * DIM * chunk
    found: dict[str, tuple[float, float]] = {}
    ways: dict[str, Prompts] = {"torch": TorchPrompts(cast(Operations, kernels), MODEL)}
    if other is not None:
        ways["flashinfer"] = other.prompts
    for name, way in ways.items():

        def own(way: Prompts = way) -> list[Partial]:
            return way.own(q, k, k, [(0, chunk)])

        def over(way: Prompts = way) -> Partial:
            return way.over(q, block)

        def merged(way: Prompts = way) -> Tensor:
            return way.attend(q, way.own(q, k, k, [(0, chunk)])[0], [block, block])

        found[f"own chunk, {name}"] = flops * chunk / 2, seconds(own)
        found[f"{STAGED} earlier tokens, {name}"] = flops * STAGED, seconds(over)
        found[f"all: its own, two such blocks, merges, {name}"] = flops * (chunk / 2 + 2 * STAGED), seconds(merged)
    host = torch.zeros(2 * chunk // PAGE, KV_HEADS, 2, PAGE, DIM, dtype=torch.bfloat16).pin_memory()
    at = torch.arange(chunk, device="cuda")
    pages = (at // PAGE).int()
    for write in (kernels.append_tokens, kernels.store_tokens):
        took = seconds(lambda write=write: write(k, k, host, pages, at))  # type: ignore[misc]
        found[f"{write.__name__} (bytes)"] = 2 * k.nbytes, took
    return found


def measure(rows: int, context: int, budget: int, other: FlashInfer | None) -> dict[str, tuple[int, str, float]]:
    """Measure the kernels: ``{kernel: (bytes that it must move, the memory that they cross, seconds)}``."""
    pages, columns, k = rows * context // PAGE, context // PAGE, budget // PAGE
    page_bytes = KvFormat(KV_HEADS, PAGE, DIM, torch.bfloat16).page_bytes
    cuda: dict[str, Any] = {"device": "cuda"}
    # Host pages stand for many: what is recalled is read from a pool of 4,096 of them.
    host = torch.randn(4096, KV_HEADS, 2, PAGE, DIM).bfloat16().pin_memory()
    frames = torch.randn(rows * k, KV_HEADS, 2, PAGE, DIM, dtype=torch.bfloat16, **cuda)
    digests = torch.randn(pages, KV_HEADS, 2, DIM, dtype=torch.bfloat16, **cuda)
    table = torch.randperm(pages, **cuda).int().view(rows, columns)
    full = torch.full((rows,), columns, dtype=torch.int32, **cuda)
    seq_lens, budgets = full * PAGE, torch.full_like(full, k)
    requests = torch.arange(rows, dtype=torch.int32, **cuda)
    frame_of = torch.full((rows, columns), -1, dtype=torch.int32, **cuda)
    frame_of[:, :k] = torch.arange(rows * k, dtype=torch.int32, **cuda).view(rows, k)
    q = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, **cuda)
    scores = kernels.page_scores(q, digests, table, full, budgets, "softmax", False, 0.5, DIM**-0.5)
    ids = torch.arange(rows * k, dtype=torch.int32, **cuda).view(rows, 1, k)
    tokens = torch.full((rows, 1), budget, dtype=torch.int32, **cuda)
    parts = kernels.parts_for(rows, KV_HEADS, budget, torch.cuda.get_device_properties("cuda").multi_processor_count)
    partials = kernels.paged_partial(q, frames, ids, tokens, DIM**-0.5, parts)
    of_cpu = (torch.randn(rows, HEADS, DIM).pin_memory(), torch.randn(rows, HEADS).pin_memory())
    recalled = torch.randint(0, len(host), (rows, 8), dtype=torch.int32, **cuda)
    to = torch.arange(rows * 8, dtype=torch.int32, **cuda).view(rows, 8)
    calls: dict[str, tuple[int, str, Callable[[], object]]] = {
        "page_scores": (
            digests.nbytes, "device",
            lambda: kernels.page_scores(q, digests, table, full, budgets, "softmax", False, 0.5, DIM**-0.5),
        ),
        "select_pages": (
            scores.nbytes, "device",
            lambda: kernels.select_pages(
                scores, full, seq_lens, budgets, requests, frame_of, table, PAGE, 1, 2, k
            ),
        ),
        "paged_partial": (
            rows * k * page_bytes, "device",
            lambda: kernels.paged_partial(q, frames, ids, tokens, DIM**-0.5, parts),
        ),
        "merge_partials": (
            of_cpu[0].nbytes, "bus", lambda: kernels.merge_partials(*partials, of_cpu, torch.bfloat16),
        ),
        "copy_pages": (recalled.numel() * page_bytes, "bus", lambda: kernels.copy_pages(host, frames, recalled, to)),
    }  # fmt: skip
    if other is not None:
        known = torch.full((rows,), budget)
        calls["paged_partial, flashinfer"] = (
            rows * k * page_bytes, "device", lambda: other.decode.attend(q, frames, ids, known)
        )  # fmt: skip
    return {name: (size, over, seconds(call)) for name, (size, over, call) in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--batches", default="1,8,40")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt's chunk")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu_kernels needs a GPU\n")
    best, other = rates(), flashinfer()
    table = Table(
        "rows", "kernel", "MB", "microseconds", "GB/s", "of the copy rate", title=torch.cuda.get_device_name()
    )
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rates": best, "rows": {}}
    for rows in map(int, arguments.batches.split(",")):
        found["rows"][rows] = measured = measure(rows, arguments.context, arguments.budget, other)
        for name, (size, over, took) in measured.items():
            rate = size / took
            table.add_row(
                str(rows), name, f"{size / 1e6:.1f}", f"{took * 1e6:.0f}", f"{rate / 1e9:.0f}",
                f"{rate / best[over]:.0%} ({over})",
            )  # fmt: skip
    Console(width=120).print(table)
    found["prompts"] = prompts = measure_prompts(arguments.chunk, other)
    table = Table("a prompt's chunk", "microseconds", "TFLOP/s, or TB/s", title=f"{arguments.chunk} tokens, one layer")
    for name, (work, took) in prompts.items():
        table.add_row(name, f"{took * 1e6:.0f}", f"{work / took / 1e12:.3g}")
    Console(width=120).print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "gpu_kernels.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
