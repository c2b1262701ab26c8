"""Measurement of this machine for ``hybrid profile --hardware``.

All probes run once in each round, in random order, and their medians count, so a busy machine disturbs all of them
alike. A step's own overhead cannot be measured without an engine; it is a general figure, and its source says so.
"""

from __future__ import annotations

import os
import random
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hybrid_backend.config.paths import user_path, write_whole
from hybrid_backend.config.reading import is_folder
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware.spec import Curve, Hardware, Number
from hybrid_backend.host_memory import System
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.cpu.measured_orders import BUSY, beside_others
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.plan.hardware import probes
from hybrid_backend.tools.plan.hardware.probes import HostMemory, Probe

_OF_GPUS = ("device_memory_bytes", "hbm_bytes_per_s", "hbm_efficiency", "gpus")
"""Keys that repeat the host's memory and its reads where the CPU is the device, and the number of GPUs."""
SPREAD = 0.5
"""Range of the middle half of a probe's rounds, relative to their median, above which a warning is printed."""
Rates = dict[str, dict[float, float]]


def measure(
    *,
    device: str = "auto",
    shape: ModelShape | None = None,
    cores: int | None = None,
    rounds: int = 5,
    memory_bytes: int | None = None,
    console: Console | None = None,
) -> Hardware:
    """Measure this machine.

    Args:
        device: "cuda", "cpu" (the device tier is the CPU itself), or "auto": CUDA if there is one.
        shape: the model whose layer is measured; None: `probes.probe_shape`.
        cores: largest number of threads; None: the CPUs that this process may use.
        rounds: repetitions of each probe.
        memory_bytes: size of the pool that is read; None: 2 GiB, or a quarter of the free memory if that is less.
        console: for the progress bar; None shows none.

    Raises:
        ConfigError: no such device, no native kernels, or too little memory.
    """
    tier = torch_device(device)
    missing = cpu.why_unavailable()
    if missing is not None:
        raise ConfigError(f"profile --hardware measures the native CPU kernels, which do not run here: {missing}")
    shape = shape or probes.probe_shape()
    usable = sorted(os.sched_getaffinity(0))
    cores = len(usable) if cores is None else cores
    if not 1 <= cores <= len(usable):
        raise ConfigError(f"cores: got {cores}, expected 1 to {len(usable)}, the CPUs that this process may use")
    free = System().available()
    size = min(2 << 30, free // 4) if memory_bytes is None else memory_bytes
    least = 3 * probes.DEVICE_ROWS[-2] * probes.JOB_TOKENS * shape.token_bytes
    if not least <= size < free:
        raise ConfigError(
            f"memory: {size >> 20} MiB to read from; this machine has {free >> 20} MiB free and the shape needs "
            f"{least >> 20} MiB at least"
        )
    with ExitStack() as opened, torch.no_grad():
        threads = torch.get_num_threads()
        opened.callback(torch.set_num_threads, threads)
        torch.set_num_threads(cores)
        memory = HostMemory(size, shape)
        counts = sorted({*(2**i for i in range(10) if 2**i < cores), cores})
        todo = list(probes.host_probes(memory, shape, counts, opened))
        todo += probes.device_probes(tier, memory, shape)
        if tier.type == "cpu":
            todo += probes.in_place_probes(memory, shape, opened.enter_context(cpu.Pool(cores)))
        (rates, spreads), busy = beside_others(lambda: _medians(todo, rounds, console))
    hardware = _profile(rates, tier, shape, cores, rounds, busy)
    if console is not None:
        for line in _doubts(spreads, busy):
            console.print(line, style="bold yellow", highlight=False, markup=False)
    return hardware


def profile_hardware(
    out: str | Path, *, device: str = "auto", rounds: int = 5, cores: int | None = None, console: Console | None = None
) -> Hardware:
    """Measure this machine, write the profile as JSON and print it as a table.

    Raises:
        ConfigError: see `measure`; or ``out`` cannot be written.
    """
    console = console or Console()
    target = user_path(out)
    if is_folder(target) or not is_folder(target.parent):
        raise ConfigError(f"{target}: cannot be written; give a file in a directory that exists, as hardware.json")
    hardware = measure(device=device, rounds=rounds, cores=cores, console=console)
    try:
        write_whole(target, hardware.to_json().encode())
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror}); give another file") from None
    console.print(table(hardware))
    console.print(f"written to {target}", highlight=False, markup=False)
    return hardware


def table(hardware: Hardware) -> Table:
    """Return the profile as a table, without what only a GPU has if there is none."""
    result = Table("what", "value", title=hardware.name)
    for name in type(hardware).model_fields:
        value = getattr(hardware, name)
        if hardware.device == "cpu" and name in _OF_GPUS:
            continue
        if isinstance(value, Number):
            result.add_row(name, _with_unit(name, value.value))
        elif isinstance(value, Curve):
            result.add_row(name, "  ".join(f"{x:g}: {y / 1e9:.3g}" for x, y in value.points) + " GB/s")
        elif isinstance(value, bool):
            result.add_row(name, "yes" if value else "no")
        elif isinstance(value, int):
            result.add_row(name, str(value))
    return result


def _with_unit(name: str, value: float) -> str:
    """Write a number of a profile in the unit that its key ends with."""
    for end, factor, unit in (
        ("_bytes_per_s", 1e9, "GB/s"),
        ("_flops_per_s", 1e9, "GFLOP/s"),
        ("_bytes", 2.0**30, "GiB"),
        ("_s", 1e-6, "us"),
    ):
        if name.endswith(end):
            return f"{value / factor:.4g} {unit}"
    return f"{value:g}"


def torch_device(name: str) -> torch.device:
    """Return the device that a command's ``--device`` names.

    Raises:
        ConfigError: an unknown name, or no such device on this machine.
    """
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"--device: got {name!r}, expected auto, cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: got 'cuda', but torch sees no CUDA device; write cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _doubts(spreads: dict[str, float], busy: float) -> list[str]:
    """Return warnings of a measurement beside other processes, or one whose rounds differ much."""
    lines = []
    again = "measure again when the machine does nothing else"
    if busy > BUSY:
        lines.append(f"warning: other processes used {busy:.0%} of the CPUs' time meanwhile, so rates are low; {again}")
    if wide := [f"{name} (by {spread:.0%})" for name, spread in sorted(spreads.items()) if spread > SPREAD]:
        lines.append(f"warning: half of the rounds differ by more than {SPREAD:.0%} in {', '.join(wide)}; {again}")
    return lines


def _medians(todo: list[Probe], rounds: int, console: Console | None) -> tuple[Rates, dict[str, float]]:
    """Return the medians of ``rounds`` rounds after a first round that does not count, and the spreads by probe.

    A probe's spread is the range of the middle half of its values over their median, at the point where it is widest.
    """
    measured: dict[tuple[str, float], list[float]] = defaultdict(list)
    runs = [(number, probe) for number in range(rounds + 1) for probe in random.sample(todo, len(todo))]
    for number, probe in track(runs, "measuring", console=console, disable=console is None):
        value = probe.run()
        if number:
            measured[probe.name, probe.x].append(value)
    rates: Rates = defaultdict(dict)
    spreads: dict[str, float] = defaultdict(float)
    for (name, x), values in sorted(measured.items()):
        rates[name][x] = statistics.median(values)
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
            spreads[name] = max(spreads[name], (high - low) / rates[name][x])
    return rates, spreads


def _profile(rates: Rates, tier: torch.device, shape: ModelShape, cores: int, rounds: int, busy: float) -> Hardware:
    beside = f" beside processes that used {busy:.0%} of the CPUs' time" if busy > BUSY else ""
    method = f"measured{beside}, median of {rounds} interleaved rounds"
    layer = f"{shape.kv_heads} KV heads of {shape.head_dim}, group {shape.heads // shape.kv_heads}"
    ram = Number(value=System().meminfo("MemTotal"), source="/proc/meminfo")

    def curve(name: str, subject: str) -> Curve:
        return Curve(points=tuple(sorted(rates[name].items())), source=f"{method}: {subject}")

    def number(value: float, source: str) -> Number:
        return Number(value=value, source=source)

    is_cuda, side = tier.type == "cuda", probes.GEMM[tier.type]
    product = str(probes.product_dtype(tier)).removeprefix("torch.")
    best_read = max(rates["host_read"].values())
    label = torch.cuda.get_device_name(tier) if is_cuda else f"CPU device tier, {_processor()}"
    total = torch.cuda.get_device_properties(tier).total_memory if is_cuda else int(ram.value)
    copied = "pinned copies to the device" if is_cuda else "copies from RAM to RAM (the CPU device tier), by one thread"
    attended = "torch's SDPA, contiguous K and V" if is_cuda else "native kernels over scattered pages, all threads"
    return Hardware(
        name=f"{label}, {counted(cores, 'core')}{', measured while busy' if busy > BUSY else ''}",
        device="gpu" if is_cuda else "cpu",
        device_memory_bytes=number(total, "the driver" if is_cuda else "/proc/meminfo: device tier and host are one"),
        hbm_bytes_per_s=number(rates["device_memory"][1] if is_cuda else best_read, f"{method}: reads"),
        hbm_efficiency=number(1.0, "the bandwidth is itself measured"),
        bf16_flops_per_s=number(rates["gemm"][1], f"{method}: {product} product of {side} x {side} matrices"),
        emulates_bf16=product == "float32",
        flops_efficiency=number(1.0, "the rate is itself measured"),
        linear_bytes_per_s=curve("linear", f"torch, bf16, layers of {shape.layer_weight_bytes / 1e6:.0f} MB, by rows"),
        device_attention_bytes_per_s=curve(
            "device_attention", f"{attended}, {layer}, {probes.JOB_TOKENS} tokens a row"
        ),
        host_device_bytes_per_s=curve("host_device", copied),
        host_ram_bytes=ram,
        host_read_bytes_per_s=curve("host_read", "sequential reads by native code, by threads"),
        cpu_attention_bytes_per_s=curve(
            "cpu_attention",
            f"native pool, {probes.CPU_ROWS} x {probes.JOB_TOKENS} tokens, pages of {probes.PAGE}, {layer}",
        ),
        layer_overhead_s=number(
            rates["layer_overhead"][1], f"{method}: two norms, rotary, activation, sums, eager torch"
        ),
        step_overhead_s=number(2e-3, "general figure, not measured: scheduler, sampler and detokenizer of a server"),
        cpu_job_overhead_s=number(rates["cpu_job"][1], f"{method}: a job of one page, from submission to result"),
        cores=cores,
        processors=torch.cuda.get_device_properties(tier).multi_processor_count if is_cuda else None,
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"
