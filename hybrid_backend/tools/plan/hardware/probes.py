"""Short measurements that each give a rate or a time.

Pages are scattered over a pool on huge memory pages that is far larger than the caches. The whole pool is read before
a page is read again.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hybrid_backend.engines.cpu_defaults import has_bf16
from hybrid_backend.hardware.timing import seconds_of
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.cpu import library
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.model import ModelShape

PAGE = 32
JOB_TOKENS = 2048
"""Tokens per sequence of a CPU job: the default budget."""
CPU_ROWS = 8
"""Number of sequences in a measured CPU job."""
DEVICE_ROWS = (1, 4, 16, 64)
PIECES = tuple(4096 * 4**i for i in range(7))
"""Bytes of a copied piece: 4 KiB to 16 MiB."""
GEMM = {"cpu": 1024, "cuda": 4096}
"""Rows of a square product."""


@dataclass(frozen=True)
class Probe:
    """A measurement. ``name`` is the field of `Hardware` that it feeds, ``x`` the point on its curve."""

    name: str
    x: float
    run: Callable[[], float]


def probe_shape() -> ModelShape:
    """Return the layer that is measured if no model is named: 8 KV heads of 128, 100 MB of matrices."""
    return ModelShape("probe", 1, 16, 8, 128, 2048, 6144, 32768, "bfloat16", True, 0, (None,))


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which products are measured: bf16, or fp32 on a CPU that emulates bf16.

    It is the dtype of a profile's ``bf16_flops_per_s``, beside which ``emulates_bf16`` says so.
    """
    return torch.bfloat16 if device.type == "cuda" or has_bf16() else torch.float32


class HostMemory:
    """A pool of pages in host memory, ``[pages, kv_heads, 2, PAGE, head_dim]``, bf16."""

    def __init__(self, size: int, shape: ModelShape) -> None:
        size = size >> 21 << 21
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(area, dtype=torch.bfloat16)
        noise = torch.randn(1 << 20).bfloat16()
        for start in range(0, flat.numel(), noise.numel()):
            part = flat[start : start + noise.numel()]
            part.copy_(noise[: part.numel()])
        kv = KvFormat(shape.kv_heads, PAGE, shape.head_dim, flat.dtype)
        self.pages, self.page_bytes = flat.nbytes // kv.page_bytes, kv.page_bytes
        self.pool = flat[: prod(kv.shape(self.pages))].view(kv.shape(self.pages))
        self._order = torch.randperm(self.pages)
        self._next = 0

    def take(self, count: int) -> Tensor:
        """Return the ids of the pages that were not read for the longest time."""
        if self._next + count > self.pages:
            self._next = 0
        self._next += count
        return self._order[self._next - count : self._next]


def read_rate(memory: HostMemory, threads: int, size: int = 128 << 20) -> float:
    """Return the bytes per second of sequential reads by threads with a part of the pool each."""
    flat, native = memory.pool, library.native()
    part = flat.nbytes // threads >> 12 << 12
    share = min(size // threads, part) >> 12 << 12
    offset = int(torch.randint(0, (part - share) // 4096 + 1, ())) * 4096
    base = (flat.data_ptr() + 63) // 64 * 64  # hb_read reads whole cache lines.
    share -= 4096

    def read(i: int) -> None:
        native.hb_read(base + i * part + offset, share)

    readers = [threading.Thread(target=read, args=(i,)) for i in range(1, threads)]
    begun = time.perf_counter()
    for reader in readers:
        reader.start()
    read(0)
    for reader in readers:
        reader.join()
    return share * threads / (time.perf_counter() - begun)


def cpu_job(memory: HostMemory, pool: cpu.Pool, shape: ModelShape, rows: int, pages: int) -> float:
    """Return the seconds of one job of the worker pool, from submission to result."""
    ids = memory.take(rows * pages).view(rows, 1, pages)
    q = torch.randn(rows, shape.heads, shape.head_dim).bfloat16()
    valid = torch.full_like(ids, PAGE)
    begun = time.perf_counter()
    pool.submit(q, memory.pool, ids, valid, shape.head_dim**-0.5).wait(60.0)
    return time.perf_counter() - begun


def host_probes(memory: HostMemory, shape: ModelShape, counts: list[int], open_pools: ExitStack) -> Iterator[Probe]:
    """Yield probes of memory reads and CPU attention for each thread count, and of the overhead of one CPU job."""
    pages = JOB_TOKENS // PAGE
    for threads in counts:
        pool = open_pools.enter_context(cpu.Pool(threads))
        yield Probe("host_read", threads, lambda n=threads: read_rate(memory, n))  # type: ignore[misc]

        def attend(pool: cpu.Pool = pool) -> float:
            seconds = sum(cpu_job(memory, pool, shape, CPU_ROWS, pages) for _ in range(2))
            return 2 * CPU_ROWS * pages * memory.page_bytes / seconds

        yield Probe("cpu_attention", threads, attend)
    pool = open_pools.enter_context(cpu.Pool(counts[-1]))
    yield Probe("cpu_job", 1, lambda: min(cpu_job(memory, pool, shape, 1, 1) for _ in range(20)))


def copy_rate(device: torch.device, memory: HostMemory, piece: int, total: int = 32 << 20) -> float:
    """Return the bytes per second of copies to the device, in contiguous pieces from scattered places."""
    flat = memory.pool.view(-1).view(torch.uint8)
    count = max(1, min(256, total // piece))
    target = torch.empty(count, piece, dtype=torch.uint8, device=device)
    starts = (torch.randint(0, flat.numel() // piece, (count,)) * piece).tolist()
    if device.type == "cuda":
        pinned = torch.stack([flat[start : start + piece] for start in starts]).pin_memory()
        sources = list(pinned)
    else:
        sources = [flat[start : start + piece] for start in starts]
        target.zero_()  # The first touch of a memory page is not part of a copy.

    def copy() -> None:
        for i, source in enumerate(sources):
            target[i].copy_(source, non_blocking=True)

    return count * piece / seconds_of(device, copy)


def linear_rate(device: torch.device, layers: list[list[Tensor]], rows: int) -> float:
    """Return the bytes of weights per second while whole layers are multiplied by ``rows`` vectors."""
    inputs = [torch.randn(rows, w.shape[1], device=device, dtype=w.dtype) for w in layers[0]]

    def run() -> None:
        for matrices in layers:
            for x, w in zip(inputs, matrices, strict=True):
                torch.nn.functional.linear(x, w)

    size = sum(w.nbytes for matrices in layers for w in matrices)
    return size / seconds_of(device, run)


def layer_matrices(device: torch.device, shape: ModelShape, copies: int = 3) -> list[list[Tensor]]:
    """Return the matrices of several layers, so that no cache holds the next one."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = [
        (q + 2 * kv, shape.hidden),
        (shape.hidden, q),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ]
    return [[torch.full(size, 0.01, dtype=torch.bfloat16, device=device) for size in sizes] for _ in range(copies)]


def small_kernels(device: torch.device, shape: ModelShape) -> float:
    """Return the seconds of one layer's small operators for one token: norms, rotary, activation, additions."""
    x = torch.randn(1, shape.hidden, device=device, dtype=torch.bfloat16)
    weight = torch.ones(shape.hidden, device=device, dtype=torch.bfloat16)
    gate, up = torch.randn(2, 1, shape.intermediate, device=device, dtype=torch.bfloat16)
    q = torch.randn(1, shape.heads, 2, shape.head_dim // 2, device=device, dtype=torch.bfloat16)
    cos = torch.ones(1, 1, shape.head_dim // 2, device=device, dtype=torch.bfloat16)

    def run() -> None:
        for _ in range(2):
            torch.nn.functional.rms_norm(x + x, (shape.hidden,), weight)
        first, second = q.unbind(2)
        torch.cat([first * cos - second * cos, first * cos + second * cos], -1)
        torch.nn.functional.silu(gate) * up

    run()
    return seconds_of(device, run, 10)


def device_probes(device: torch.device, memory: HostMemory, shape: ModelShape) -> Iterator[Probe]:
    """Yield copies by piece, matrices and attention by rows, a square product, small kernels."""
    for piece in PIECES:
        yield Probe("host_device", piece, lambda n=piece: copy_rate(device, memory, n))  # type: ignore[misc]
    layers = layer_matrices(device, shape)
    for rows in DEVICE_ROWS:
        yield Probe("linear", rows, lambda n=rows: linear_rate(device, layers, n))  # type: ignore[misc]
    side = GEMM[device.type]
    square = torch.full((side, side), 0.01, dtype=product_dtype(device), device=device)
    yield Probe("gemm", 1, lambda: 2.0 * side**3 / seconds_of(device, lambda: square @ square))
    yield Probe("layer_overhead", 1, lambda: small_kernels(device, shape))
    if device.type == "cuda":
        for rows in DEVICE_ROWS:
            kv = torch.randn(2, rows, shape.kv_heads, JOB_TOKENS, shape.head_dim, device=device, dtype=torch.bfloat16)
            q = torch.randn(rows, shape.heads, 1, shape.head_dim, device=device, dtype=torch.bfloat16)

            def attend(q: Tensor = q, kv: Tensor = kv) -> float:
                attention = torch.nn.functional.scaled_dot_product_attention
                return kv.nbytes / seconds_of(device, lambda: attention(q, kv[0], kv[1], enable_gqa=True), 5)

            yield Probe("device_attention", rows, attend)
        large = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        yield Probe(
            "device_memory", 1, lambda: large.nbytes / seconds_of(device, lambda: large.view(torch.int64).sum(), 5)
        )


def in_place_probes(memory: HostMemory, shape: ModelShape, pool: cpu.Pool) -> Iterator[Probe]:
    """Yield attention by rows of a device tier that is the CPU: all threads over host pages."""
    pages = JOB_TOKENS // PAGE
    for rows in DEVICE_ROWS[:-1]:

        def attend(rows: int = rows) -> float:
            return rows * pages * memory.page_bytes / cpu_job(memory, pool, shape, rows, pages)

        yield Probe("device_attention", rows, attend)
