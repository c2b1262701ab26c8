"""Compile every Triton kernel at every shape that configurations ask for, without a GPU.

    python -m bench.triton_compile [--arch 80 86 89 90 100 120] [--largest] [--json FILE]

Launches go to a driver that only says what it would run on; each is compiled to PTX and on to machine code, which tells
its registers, shared memory and spills; from these follow the programs that a multiprocessor holds at once, and for the
kernels that read much how many bytes it then has under way. Prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hybrid_backend.kernels import byte_digests
from hybrid_backend.kernels.cpu import RequestBoxes
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import (
    AGGREGATES,
    SIMILARITIES,
    Copies,
    Counters,
    Maps,
    Reuse,
    RowStates,
    Sample,
    Selection,
)
from hybrid_backend.kernels.triton import operations as kernels
from hybrid_backend.kernels.triton import predict, questions, residency, signal
from hybrid_backend.methods.selective import MOST_FRAMES

# kv_heads, group, head_dim, page_size of models that people serve: SmolLM2-135M, Qwen3-0.6B, Llama-3-8B, Qwen3-14B,
# Phi-3 (head_dim 96), Gemma-3 (256); with large pages, and a model with 16 query heads per KV head.
SHAPES = [
    (3, 3, 64, 16),
    (8, 2, 128, 16),
    (8, 4, 128, 32),
    (8, 5, 128, 64),
    (32, 1, 96, 16),
    (4, 2, 256, 32),
    (2, 16, 128, 16),
]


class Processor(NamedTuple):
    """Limits of a multiprocessor (CUDA C++ Programming Guide, technical specifications per compute capability)."""

    warps: int
    programs: int
    shared: int
    """Bytes of shared memory for all programs, each of which takes 1 KiB more for itself."""

    @property
    def most_shared(self) -> int:
        """Bytes of shared memory that one program may have."""
        return self.shared - 1024


PROCESSORS = {
    80: Processor(64, 32, 164 << 10),  # A100
    86: Processor(48, 16, 100 << 10),  # A10, A40, RTX 30
    89: Processor(48, 24, 100 << 10),  # L4, L40S, RTX 40
    90: Processor(64, 32, 228 << 10),  # H100, H200
    100: Processor(64, 32, 228 << 10),  # B200
    120: Processor(48, 24, 100 << 10),  # RTX 50, RTX PRO
}
"""Multiprocessors by compute capability."""
COLUMNS = (512, 32768)  # pages of a row: scores in one tile and in many


class _NoGpu:
    """A driver for compiling only."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_all(arch: int, only_largest: bool = False) -> list[dict[str, Any]]:
    """Return an entry per compiled variant of a kernel: name, shape, registers, shared and local bytes, seconds.

    Args:
        arch: compute capability, as 90 for 9.0.
        only_largest: compile only what takes the most shared memory: attention and digests of heads of 256 channels.
    """
    triton.runtime.driver.set_active(_NoGpu(arch))
    found: list[dict[str, Any]] = []
    shape: tuple[Any, ...] = ()
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        began = time.perf_counter()
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if not any(entry["hash"] == kernel.hash for entry in found):
            report = {"kernel": self.fn.__name__.strip("_"), "shape": str(shape), "hash": kernel.hash}
            resources = _resources(kernel)
            warps = int(kernel.metadata.num_warps)
            programs = resident_programs(PROCESSORS[arch], resources["registers"], resources["shared"], warps)
            each = _bytes_under_way(report["kernel"], resources["shared"], args)
            more = {"programs": programs, "under_way": programs * each}
            found.append({**report, **resources, **more, "seconds": round(time.perf_counter() - began, 2)})
        return kernel

    JITFunction.run = compile_only
    try:
        if only_largest:
            for page in (16, 32, 64):
                shape = (4, 2, 256, page, "bfloat16")
                launch_largest(4, 2, 256, page)
            return found
        for dtype, sizes in ((torch.bfloat16, SHAPES), (torch.float16, SHAPES[:1]), (torch.float32, SHAPES[:1])):
            for size in sizes:
                shape = (*size, str(dtype).removeprefix("torch."))
                launch_all(*size, dtype, columns=COLUMNS if size == SHAPES[0] else COLUMNS[1:])
                shape = (*shape, "int8")
                launch_encoded(*size, dtype)
        shape = (*SHAPES[0], "slices")  # nothing new is compiled for them
        with _slices():
            launch_all(*SHAPES[0], torch.bfloat16, columns=COLUMNS)
    finally:
        JITFunction.run = launch
    return found


@contextmanager
def _slices() -> Iterator[None]:
    """Make lists, counts and maps slices that are not aligned to 16 bytes, as those of a layer or of a batch are."""
    make = torch.zeros

    def sliced(*shape: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
        size = shape[0] if isinstance(shape[0], tuple) else shape
        return make(math.prod(size) + 1, dtype=dtype, **options)[1:].view(size)

    torch.zeros = sliced  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.zeros = make  # type: ignore[assignment]


def launch_largest(kv_heads: int, group: int, dim: int, page: int) -> None:
    """Call the functions of the kernels that hold whole pages in shared memory, in bf16."""
    rows = 4
    host = torch.empty(8, kv_heads, 2, page, dim, dtype=torch.bfloat16)
    coded = torch.empty(8, kv_heads, 4 * dim, dtype=torch.uint8)
    q = torch.empty(rows, kv_heads * group, dim, dtype=torch.bfloat16)
    line, table = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, COLUMNS[0], dtype=torch.int32)
    kernels.paged_partial(q, host, table[:, None, :64], line[:, None], dim**-0.5, 32)
    kernels.build_digests(host, coded, line, line)
    kernels.page_scores(q, coded, table, line, line, "softmax", False, 0.5, dim**-0.5, page)
    encoded = torch.empty(KvFormat(kv_heads, page, dim, torch.int8).shape(8), dtype=torch.int8)
    kernels.paged_partial(q, encoded, table[:, None, :64], line[:, None], dim**-0.5, 32)
    kernels.build_digests(encoded, coded, line, line)


def launch_all(kv_heads: int, group: int, dim: int, page: int, dtype: torch.dtype, columns: Sequence[int]) -> None:
    """Call each kernel's function once per variant."""
    rows, heads, k = 4, kv_heads * group, 64
    host = torch.empty(8, kv_heads, 2, page, dim, dtype=dtype)
    digests = torch.empty(8, kv_heads, 2, dim, dtype=dtype)
    coded, rounded = (torch.empty(8, kv_heads, row, dtype=torch.uint8) for row in (4 * dim, byte_digests.row(dim)))
    q, new = torch.empty(rows, heads, dim, dtype=dtype), torch.empty(rows, kv_heads, dim, dtype=dtype)
    line = torch.zeros(rows, dtype=torch.int32)
    long = torch.zeros(rows, dtype=torch.int64)
    table = torch.zeros(rows, max(COLUMNS), dtype=torch.int32)
    cpu = torch.empty(rows, heads, dim), torch.empty(rows, heads)
    counters = torch.zeros(len(Counters._fields), dtype=torch.int64)
    for lists in (1, kv_heads):
        ids, tokens = torch.zeros(rows, lists, k, dtype=torch.int32), torch.zeros(rows, lists, dtype=torch.int32)
        box = Sample(q[0], table[0], ids[0], tokens[0], cpu[1], line[:1])
        for predicted in (q, None):
            kernels.take_sample(q, predicted, ids, tokens, table, line, line[:1], line[:1], line[:1], box)
        for parts in (1, 32):
            partials = kernels.paged_partial(q, host, ids, tokens, dim**-0.5, parts)
            if lists == kv_heads:
                heads_of_pages = host.flatten(0, 1)[:, None]
                for kv, chosen in ((heads_of_pages, None), (heads_of_pages, ids), (host, ids[:, :1])):
                    kernels.paged_partial(q, kv, chosen, tokens, dim**-0.5, parts, begins=tokens)
            for other in (None, cpu):
                for sinks in (None, cpu[1][0]):
                    kernels.merge_partials(*partials, other, dtype, sinks)
    kernels.page_weights(
        q, host, table[:, None, :k], table[:, None, :k], line[:, None], cpu[1], torch.empty(8, kv_heads, page),
        dim**-0.5, 0.3, True,
    )  # fmt: skip
    kernels.build_digests(host, digests, line, line)
    kernels.append_tokens(new, new, host, line, line, host, line, table, digests)
    kernels.build_digests(host, coded, line, line)
    kernels.append_tokens(new, new, host, line, long, digests=coded)
    kernels.build_digests(host, rounded, line, line)
    kernels.append_tokens(new, new, host, line, line, host, line, table, rounded)
    kernels.append_tokens(new, new, host, line, long, digests=rounded)
    again = Reuse(line, *[table[:, :1]] * 3, torch.zeros(rows, 1, max(COLUMNS)))
    for reuse in (None, again):
        kernels.page_scores(q, coded, table, line, line, "softmax", False, 0.5, dim**-0.5, page, reuse=reuse)
    kernels.append_tokens(new, new, host, line, long)
    kernels.append_tokens(new, new, host, line, line, heads=long)
    kernels.store_tokens(new, new, host, line, long)
    kernels.extend_digests(new, digests, line, 3, page)
    whole = torch.empty(2 * page, kv_heads, dim, dtype=dtype)
    for store in (rounded, coded):
        kernels.extend_digests(whole, store, line[:2], 0, page)
    chunk, sums = q[:, :, None], cpu[1][:, :, None]  # of prompts: partials in the queries' type, and merged ones
    kernels.merge_partials(chunk, sums, (q, cpu[1]))
    kernels.merge_partials(cpu[0][:, :, None], sums, (q, cpu[1]), into=cpu[0])
    for aggregate, counted in zip(SIMILARITIES, (counters, None), strict=True):
        kernels.match_labels(q, q, cpu[1][0], cpu[1][0, :kv_heads], line, line, line, aggregate, counted)
    for width in columns:
        for per_head in (False, True):
            for aggregate in AGGREGATES:
                lists = kv_heads if per_head else 1
                again = Reuse(line, *[table[:, :lists]] * 3, torch.zeros(rows, lists, width))
                for store, reuse in itertools.product((digests, rounded), (None, again)):
                    scores = kernels.page_scores(
                        q, store, table[:, :width], line, line, aggregate, per_head, 0.5, dim**-0.5, reuse=reuse
                    )
            frame_of = torch.zeros(rows, width, dtype=torch.int32)
            frames = (frame_of, None, None), (frame_of, counters, None), (None, counters, None)
            for resident, counted, reuse in (*frames, (frame_of, counters, again), (frame_of, None, again)):
                mailbox = None if counted is None else (ids, tokens)
                chosen = kernels.select_pages(
                    scores, line, line, line, line, resident, table[:, :width], page, 1, 2, k, counted, mailbox, reuse
                )
        kernels.union_pages(chosen.absent, chosen.missing_listed, scores)
    maps = Maps(table[None], table, torch.zeros(1, max(COLUMNS)))
    copies = Copies(*[table[None, :, :k]] * 3, torch.zeros(1, rows, k), line[None], long[None])
    scores = torch.zeros(rows, 1, max(COLUMNS))
    for size in (k, 4 * k, MOST_FRAMES):  # frames of a request
        small = Maps(table[None], torch.zeros(1, rows * size, dtype=torch.int32), torch.zeros(1, rows * size))
        keep = torch.zeros(rows, size, dtype=torch.int32)
        for lists, listed in ((1, k), (kv_heads, k), (1, 8 * MOST_FRAMES)):
            absent = (table[:, None, :listed], line[:, None])
            chosen = table[:, None, :k].expand(-1, lists, -1).contiguous(), line[:, None].expand(-1, lists).contiguous()
            kernels.plan_recall(
                small.of(0),
                copies.of(0),
                scores,
                table,
                chosen,
                absent,
                line,
                line,
                line,
                line,
                line,
                1,
                2,
                8,
                3,
                keep,
                counters,
            )
        kernels.note_scores(small.of(0), scores, line, line, line, 1, 2)
        kernels.open_pages(small, line, line, line, page, 1)
    kernels.commit_pages(maps, copies, long)
    kernels.copy_pages(host, host, line, line)
    signal.ask(q, q, line, line[:1], line[:1], line[:, None], counters)
    signal.await_answer(line, line[:1], line, long[:1], counters)
    flags = torch.zeros(rows, 16, dtype=torch.int32)
    boxes = RequestBoxes(q, table, line, line, *cpu, flags, flags, flags)
    questions.ask_rows(boxes, q, table, line, line, line, 3, line)
    states = RowStates(*[line] * len(RowStates._fields))
    questions.take_rows(boxes, 3, line, states, line, line, *cpu, long, long, long.expand(4, -1), line, counters)
    published = torch.zeros(8, rows, 2, dtype=torch.int32)
    questions.publish(states, line[:1], published)
    hidden, saved = q.flatten(1), torch.empty(rows + 1, 2, heads * dim)
    for residual, tokens in ((hidden, None), (None, None), (hidden, long)):
        questions.move_inputs(states, 3, hidden, residual, tokens, long, saved)
    plan_heads(kv_heads, page)
    predict_all(q)


def launch_encoded(kv_heads: int, group: int, dim: int, page: int, dtype: torch.dtype) -> None:
    """Call each function of the kernels that read or write pages, once per variant, with pages in 8 bits."""
    rows, k = 4, 64
    host = torch.empty(KvFormat(kv_heads, page, dim, torch.int8).shape(8), dtype=torch.int8)
    digests = torch.empty(8, kv_heads, 2, dim, dtype=dtype)
    coded, rounded = (torch.empty(8, kv_heads, row, dtype=torch.uint8) for row in (4 * dim, byte_digests.row(dim)))
    q, new = torch.empty(rows, kv_heads * group, dim, dtype=dtype), torch.empty(rows, kv_heads, dim, dtype=dtype)
    line, long = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    table, lse = torch.zeros(rows, 1, COLUMNS[0], dtype=torch.int32), torch.empty(rows, kv_heads * group)
    for lists in (1, kv_heads):
        ids, tokens = torch.zeros(rows, lists, k, dtype=torch.int32), torch.zeros(rows, lists, dtype=torch.int32)
        kernels.paged_partial(q, host, ids, tokens, dim**-0.5, 32)
    heads_of_pages = host.flatten(0, 1)[:, None]
    for kv, chosen in ((heads_of_pages, None), (heads_of_pages, ids), (host, ids[:, :1])):
        kernels.paged_partial(q, kv, chosen, tokens, dim**-0.5, 32, begins=tokens)
    average = torch.empty(8, kv_heads, page)
    kernels.page_weights(q, host, table, table, line[:, None], lse, average, dim**-0.5, 0.3, True)
    for store in (digests, coded, rounded):
        kernels.build_digests(host, store, line, line)
    for store in (digests, rounded):
        kernels.append_tokens(new, new, host, line, line, host, line, table[:, 0], store)
    for store in (None, rounded, coded):
        kernels.append_tokens(new, new, host, line, long, digests=store)
    kernels.append_tokens(new, new, host, line, line, heads=long)
    kernels.store_tokens(new, new, host, line, long)
    kernels.copy_pages(host, host, line, line)


def plan_heads(kv_heads: int, page: int) -> None:
    """Compile the kernels that plan copies of pages of single KV heads."""
    lists, ranks = torch.zeros(4 * kv_heads, 1, 64, dtype=torch.int32), torch.zeros(kv_heads, dtype=torch.int32)
    number, frames = lists[:, :, 0], lists[:, 0, :60].contiguous()
    chosen = Selection(lists, number, lists, number, number, lists, lists, number)
    kernels.plan_load(chosen, number, number, frames, 1, frames)
    table, line = torch.zeros(4, COLUMNS[0], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for edges in ((0, 1, False), (1, 17, True)):
        kernels.plan_stream(table, line, line, ranks, 2, 2, 3, 1000, page, *edges)


def predict_all(q: torch.Tensor) -> None:
    """Compile the kernels of the prediction, for hidden states as wide as all heads and as those of the largest models.

    Queries have norms of heads or of all heads together, and rotary embedding of both styles, of all or half of a head.
    """
    rows, heads, dim = q.shape
    for width in (heads * dim, 16384):
        hidden = q.new_empty(rows, width)
        for adds_one, residual in ((False, None), (False, hidden), (True, hidden)):
            predict.normed_stream(hidden, residual, predict.RmsNorm(q.new_empty(width), 1e-6, adds_one))
    of_heads, of_all = (predict.RmsNorm(q.new_empty(n), 1e-6, n == dim) for n in (dim, heads * dim))
    positions = torch.zeros(rows, dtype=torch.int64)
    whole, half = (predict.Rotation(positions, q.new_empty(8, n), n == dim) for n in (dim, dim // 2))
    for norm in (None, of_heads, of_all):
        for rotation in (None, whole, half):
            predict.finished_queries(q, norm, rotation)


def _resources(kernel: Any) -> dict[str, int]:
    """Return the resources of the compiled code.

    ``local`` is in bytes per thread on the stack or spilled; ``narrow`` counts loads and stores of 1 or 2 bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": numbers["REG"],
        "local": numbers["STACK"] + numbers["LOCAL"],
        "shared": int(kernel.metadata.shared),
        "narrow": len(re.findall(r"(?:ld|st)\.global[.\w]*\.[bu](?:8|16)\b", kernel.asm["ptx"])),
    }


def resident_programs(processor: Processor, registers: int, shared: int, warps: int) -> int:
    """Return the programs that a multiprocessor holds at once; 0 if not even one fits.

    Args:
        processor: limits of the multiprocessor, which has 65,536 registers, given to warps 256 at a time.
        registers: registers of a thread.
        shared: bytes of shared memory of a program.
        warps: warps of a program.
    """
    of_a_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers, by_shared = 65536 // (of_a_warp * warps), processor.shared // (shared + 1024)
    return min(processor.programs, processor.warps // warps, by_registers, by_shared)


def _bytes_under_way(kernel: str, shared: int, args: tuple[Any, ...]) -> int:
    """Return the bytes that a program has requested from memory at once.

    ``partial`` requests the tiles of K and V that fill its shared memory, ``score`` both halves of a tile's digests,
    ``copy`` a block.
    """
    if kernel == "partial_kernel":
        return shared
    if kernel == "score_kernel":
        return 2 * 64 * int(args[0].shape[-1]) * int(args[1].element_size())
    return residency.COPY_BLOCK * int(args[0].element_size()) if kernel == "copy_kernel" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=PROCESSORS, default=list(PROCESSORS))
    parser.add_argument("--largest", action="store_true", help="only what takes the most shared memory: seconds")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {arch: compile_all(arch, arguments.largest) for arch in arguments.arch}
    for arch, entries in found.items():
        _print(arch, entries)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def _print(arch: int, found: list[dict[str, Any]]) -> None:
    columns = ("registers", "shared", "local", "programs", "under_way")
    heads = ("registers", "shared bytes", "local bytes", "programs per SM", "bytes under way per SM")
    table = Table("kernel", "variants", *heads, title=f"sm_{arch}")
    for name in sorted({entry["kernel"] for entry in found}):
        mine = [entry for entry in found if entry["kernel"] == name]
        table.add_row(
            name, str(len(mine)), *(f"{min(e[x] for e in mine)} to {max(e[x] for e in mine)}"
                                    for x in columns)
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
