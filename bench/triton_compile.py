"""Compile every Triton kernel at every shape that configurations ask for, without a GPU.

    python -m bench.triton_compile [--arch 80 86 89 90 100 120] [--largest] [--json FILE]

Launches go to a driver that only says what it would run on; each is compiled to PTX and on to machine code, which tells
its registers, shared memory and spills; from these follow the programs that a multiprocessor holds at once, and for the
kernels that read much how many bytes it then has under way. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.triton_launches import COLUMNS, launch_all, launch_encoded, launch_largest
from hybrid_backend.kernels.triton import residency

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
    # A process compiles for one kind of GPU only, as Triton keeps what it compiled for a device, whatever its kind is.
    one_each = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), max_tasks_per_child=1)
    with one_each as processes:
        compiled = processes.map(compile_all, arguments.arch, repeat(arguments.largest))
        found = dict(zip(arguments.arch, compiled, strict=True))
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
