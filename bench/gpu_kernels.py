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
from dataclasses import dataclass
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

ASLEEP = 10_000_000  # cycles: longer than the host needs to launch the calls of a round


@dataclass(frozen=True)
class Bench:
    """Timing of kernels at the shape of a model, of Qwen3-14B by default.

    ``staged`` is the tokens of a staging buffer, ``host_pages`` the pages of the pool from which pages are recalled.
    """

    heads: int = 40
    kv_heads: int = 8
    dim: int = 128
    page: int = 32
    staged: int = 4096
    host_pages: int = 4096
    copied_bytes: int = 1 << 28
    rounds: int = 5
    calls: int = 20

    @property
    def model(self) -> ModelSpec:
        return ModelSpec(1, self.heads, self.kv_heads, self.dim, self.dim**-0.5, torch.bfloat16)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call: the median of a few rounds of ``calls`` calls without gaps.

        The host launches the calls while the device still sleeps.
        """
        call()
        torch.cuda.synchronize()
        times = []
        for _ in range(self.rounds):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(ASLEEP)
            began.record()
            for _ in range(self.calls):
                call()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3 / self.calls)
        return float(sorted(times)[self.rounds // 2])

    def copy_rates(self) -> dict[str, float]:
        """Return the bytes per second of copies on the device (read plus written) and over the bus."""
        size = self.copied_bytes
        here, there = (torch.empty(size, dtype=torch.int8, device="cuda") for _ in range(2))
        pinned = torch.empty(size, dtype=torch.int8, pin_memory=True)
        return {
            "device": 2 * size / self.seconds(lambda: there.copy_(here)),
            "bus": size / self.seconds(lambda: here.copy_(pinned, non_blocking=True)),
        }

    def find_flashinfer(self) -> FlashInfer | None:
        """Return FlashInfer, or None after printing the reason if it cannot be used here."""
        found = FlashInfer.try_create(cast(Operations, kernels), self.model, torch.device("cuda"))
        if isinstance(found, str):
            print(f"FlashInfer is left out: {found}")
            return None
        return found

    def time_prompts(self, chunk: int, other: FlashInfer | None) -> dict[str, tuple[float, float]]:
        """Measure one layer by PyTorch and by FlashInfer: ``{name: (operations, or bytes over the bus, seconds)}``."""
        cuda: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        q, k = torch.randn(chunk, self.heads, self.dim, **cuda), torch.randn(chunk, self.kv_heads, self.dim, **cuda)
        staged = torch.randn(self.kv_heads, 2, self.staged, self.dim, **cuda)
        block = KVBlock(tuple(range(self.kv_heads)), *staged.unbind(1))
        flops = 4 * self.heads * self.dim * chunk
        found: dict[str, tuple[float, float]] = {}
        ways: dict[str, Prompts] = {"torch": TorchPrompts(cast(Operations, kernels), self.model)}
        if other is not None:
            ways["flashinfer"] = other.prompts
        for name, way in ways.items():

            def own(way: Prompts = way) -> list[Partial]:
                return way.own(q, k, k, [(0, chunk)])

            def over(way: Prompts = way) -> Partial:
                return way.over(q, block)

            def merged(way: Prompts = way) -> Tensor:
                return way.attend(q, way.own(q, k, k, [(0, chunk)])[0], [block, block])

            found[f"own chunk, {name}"] = flops * chunk / 2, self.seconds(own)
            found[f"{self.staged} earlier tokens, {name}"] = flops * self.staged, self.seconds(over)
            found[f"all: its own, two such blocks, merges, {name}"] = (
                flops * (chunk / 2 + 2 * self.staged),
                self.seconds(merged),
            )
        host = torch.zeros(
            2 * chunk // self.page, self.kv_heads, 2, self.page, self.dim, dtype=torch.bfloat16
        ).pin_memory()
        at = torch.arange(chunk, device="cuda")
        pages = (at // self.page).int()
        for write in (kernels.append_tokens, kernels.store_tokens):
            took = self.seconds(lambda write=write: write(k, k, host, pages, at))  # type: ignore[misc]
            found[f"{write.__name__} (bytes)"] = 2 * k.nbytes, took
        return found

    def time_kernels(
        self, rows: int, context: int, budget: int, other: FlashInfer | None
    ) -> dict[str, tuple[int, str, float]]:
        """Measure the kernels: ``{kernel: (bytes that it must move, the memory that they cross, seconds)}``."""
        pages, columns, k = rows * context // self.page, context // self.page, budget // self.page
        page_bytes = KvFormat(self.kv_heads, self.page, self.dim, torch.bfloat16).page_bytes
        cuda: dict[str, Any] = {"device": "cuda"}
        # Host pages stand for many: what is recalled is read from a pool of ``host_pages`` of them.
        host = torch.randn(self.host_pages, self.kv_heads, 2, self.page, self.dim).bfloat16().pin_memory()
        frames = torch.randn(rows * k, self.kv_heads, 2, self.page, self.dim, dtype=torch.bfloat16, **cuda)
        digests = torch.randn(pages, self.kv_heads, 2, self.dim, dtype=torch.bfloat16, **cuda)
        table = torch.randperm(pages, **cuda).int().view(rows, columns)
        full = torch.full((rows,), columns, dtype=torch.int32, **cuda)
        seq_lens, budgets = full * self.page, torch.full_like(full, k)
        requests = torch.arange(rows, dtype=torch.int32, **cuda)
        frame_of = torch.full((rows, columns), -1, dtype=torch.int32, **cuda)
        frame_of[:, :k] = torch.arange(rows * k, dtype=torch.int32, **cuda).view(rows, k)
        q = torch.randn(rows, self.heads, self.dim, dtype=torch.bfloat16, **cuda)
        scores = kernels.page_scores(q, digests, table, full, budgets, "softmax", False, 0.5, self.dim**-0.5)
        ids = torch.arange(rows * k, dtype=torch.int32, **cuda).view(rows, 1, k)
        tokens = torch.full((rows, 1), budget, dtype=torch.int32, **cuda)
        parts = kernels.parts_for(
            rows, self.kv_heads, budget, torch.cuda.get_device_properties("cuda").multi_processor_count
        )
        partials = kernels.paged_partial(q, frames, ids, tokens, self.dim**-0.5, parts)
        of_cpu = (torch.randn(rows, self.heads, self.dim).pin_memory(), torch.randn(rows, self.heads).pin_memory())
        count = min(8, k)  # A row has no more than k frames to recall into.
        recalled = torch.randint(0, len(host), (rows, count), dtype=torch.int32, **cuda)
        to = torch.arange(rows * count, dtype=torch.int32, **cuda).view(rows, count)
        calls: dict[str, tuple[int, str, Callable[[], object]]] = {
            "page_scores": (
                digests.nbytes, "device",
                lambda: kernels.page_scores(q, digests, table, full, budgets, "softmax", False, 0.5, self.dim**-0.5),
            ),
            "select_pages": (
                scores.nbytes, "device",
                lambda: kernels.select_pages(
                    scores, full, seq_lens, budgets, requests, frame_of, table, self.page, 1, 2, k
                ),
            ),
            "paged_partial": (
                rows * k * page_bytes, "device",
                lambda: kernels.paged_partial(q, frames, ids, tokens, self.dim**-0.5, parts),
            ),
            "merge_partials": (
                of_cpu[0].nbytes, "bus", lambda: kernels.merge_partials(*partials, of_cpu, torch.bfloat16),
            ),
            "copy_pages": (
                recalled.numel() * page_bytes, "bus", lambda: kernels.copy_pages(host, frames, recalled, to),
            ),
        }  # fmt: skip
        if other is not None:
            known = torch.full((rows,), budget)
            calls["paged_partial, flashinfer"] = (
                rows * k * page_bytes, "device", lambda: other.decode.attend(q, frames, ids, known)
            )  # fmt: skip
        return {name: (size, over, self.seconds(call)) for name, (size, over, call) in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--batches", default="1,8,40")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt's chunk")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu_kernels needs a GPU\n")
    bench = Bench()
    best, other = bench.copy_rates(), bench.find_flashinfer()
    table = Table(
        "rows", "kernel", "MB", "microseconds", "GB/s", "of the copy rate", title=torch.cuda.get_device_name()
    )
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rates": best, "rows": {}}
    for rows in map(int, arguments.batches.split(",")):
        found["rows"][rows] = measured = bench.time_kernels(rows, arguments.context, arguments.budget, other)
        for name, (size, over, took) in measured.items():
            rate = size / took
            table.add_row(
                str(rows), name, f"{size / 1e6:.1f}", f"{took * 1e6:.0f}", f"{rate / 1e9:.0f}",
                f"{rate / best[over]:.0%} ({over})",
            )  # fmt: skip
    Console(width=120).print(table)
    found["prompts"] = prompts = bench.time_prompts(arguments.chunk, other)
    table = Table("a prompt's chunk", "microseconds", "TFLOP/s, or TB/s", title=f"{arguments.chunk} tokens, one layer")
    for name, (work, took) in prompts.items():
        table.add_row(name, f"{took * 1e6:.0f}", f"{work / took / 1e12:.3g}")
    Console(width=120).print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "gpu_kernels.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
