"""Rates of the device tier's kernels: `bench.gpu_kernels`, at a few batches, and of a prompt's chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.gpu_session.case import Context


def measure(options: Mapping[str, Any], context: Context) -> None:
    """Emit each kernel's bytes per second and its share of the copy rate of the memory that it crosses."""
    from bench.gpu_kernels import Bench

    bench = Bench(**options["bench"])
    rates, other = bench.copy_rates(), bench.find_flashinfer()
    context.emit(kernel="copies", **{f"{name}_gb_per_second": rate / 1e9 for name, rate in rates.items()})
    for rows in options["batches"]:
        timed = bench.time_kernels(rows, options["context"], options["budget"], other)
        for name, (size, memory, seconds) in timed.items():
            context.emit(
                kernel=name, rows=rows, microseconds=seconds * 1e6, gb_per_second=size / seconds / 1e9,
                of_copy_rate=size / seconds / rates[memory], memory=memory,
            )  # fmt: skip
    for name, (work, seconds) in bench.time_prompts(options["chunk"], other).items():
        context.emit(kernel=f"prompt: {name}", microseconds=seconds * 1e6, tera_per_second=work / seconds / 1e12)
