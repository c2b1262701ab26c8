"""Named machines with a GPU: data sheets for the device, a typical server for the host. CPU servers: `cpu_machines`.

A measured profile (``hybrid profile --hardware``) is better. What a data sheet does not say (achieved shares,
overheads) is one general figure for all machines, and its ``source`` says so.

Data sheets: NVIDIA T4 (2018), A10 (2021), A40 (2021), A100 (2021), H100 (2022), H200 (2023), Ada GPU architecture
whitepaper (RTX 4090, 2022), L40S (2023); numbers of processors from the same. PCI Express: 8, 16 and 32 GT/s per lane
for generations 3, 4 and 5 with 128b/130b coding, so 15.75, 31.5 and 63 GB/s per direction on 16 lanes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from hybrid_backend.config.reading import is_file
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware.cpu_machines import (
    CORE_BYTES_PER_S,
    KERNEL_SHARE,
    STREAM_SHARE,
    cpu_machines,
    thread_counts,
)
from hybrid_backend.hardware.spec import Hardware, Number, copies, read_hardware, saturating

PCIE_PEAK = {3: 15.75e9, 4: 31.5e9, 5: 63e9, 6: 121e9}
"""Bytes per second and direction, 16 lanes (PCI Express base specifications 3.0 to 6.0)."""
PCIE_EFFICIENCY = 0.8
"""Large pinned copies against that peak: 25 GB/s of 31.5 on PCIe 4 is the usual measurement."""
COPY_SETUP_S = 6e-6
"""Set-up time of a cudaMemcpyAsync: 5 to 7 us (DualPath, arXiv 2602.21548, section 5.2)."""
MIB = 2**20


class _Host(NamedTuple):
    """A typical host for one device. ``transfers`` is the rate of a memory channel, per second."""

    name: str
    cores: int
    channels: int
    transfers: float
    ram_gib: int


def _machine(
    name: str,
    *,
    sheet: str,
    memory_mib: int,
    hbm: float,
    flops: float,
    pcie: int,
    processors: int,
    host: _Host,
) -> Hardware:
    """Return a device by its data sheet, on a host whose memory channels are 8 bytes wide."""
    peak = host.channels * 8 * host.transfers
    read, per_core, threads = STREAM_SHARE * peak, CORE_BYTES_PER_S, thread_counts(host.cores)
    channels = f"{host.channels} channels at {host.transfers / 1e6:.0f} MT/s = {peak / 1e9:.0f} GB/s peak"
    memory = f"{host.name}: {channels}, 80 % as STREAM"
    link = f"PCIe {pcie} x16, {PCIE_PEAK[pcie] / 1e9:g} GB/s peak, {PCIE_EFFICIENCY:.0%} of it for large pinned copies"
    return Hardware(
        name=name,
        device_memory_bytes=Number(value=memory_mib * MIB, source=f"{sheet}; {memory_mib} MiB as drivers say"),
        hbm_bytes_per_s=Number(value=hbm, source=sheet),
        hbm_efficiency=Number(value=0.8, source="general figure: decoding kernels reach 75 to 90 % of the peak"),
        bf16_flops_per_s=Number(value=flops, source=sheet),
        flops_efficiency=Number(value=0.6, source="general figure: large GEMMs reach 50 to 75 % of the peak"),
        host_device_bytes_per_s=copies(
            PCIE_PEAK[pcie] * PCIE_EFFICIENCY,
            COPY_SETUP_S / COPIES_AT_ONCE,
            f"{link}; {COPY_SETUP_S * 1e6:g} us per copy (arXiv 2602.21548), {COPIES_AT_ONCE} in flight",
        ),
        host_ram_bytes=Number(value=host.ram_gib * 2**30, source=host.name),
        host_read_bytes_per_s=saturating(threads, per_core, read, f"{memory}; {per_core / 1e9:g} GB/s per core"),
        cpu_attention_bytes_per_s=saturating(
            threads,
            KERNEL_SHARE * per_core,
            KERNEL_SHARE * read,
            f"{memory}; our kernels read K and V at 80 % (docs/lab/cpu-kernels.md)",
        ),
        layer_overhead_s=Number(value=20e-6, source="general figure: about ten small kernels of 2 us in a CUDA graph"),
        step_overhead_s=Number(value=2e-3, source="general figure: scheduler, sampler and detokenizer of a server"),
        cpu_job_overhead_s=Number(value=30e-6, source="general figure: flags in pinned memory, threads that spin"),
        cores=host.cores,
        processors=processors,
    )


COPIES_AT_ONCE = 4
"""Copies whose submission overlaps; a copy kernel over pinned memory (kernels/triton/recall.py) does better still."""

_T4_HOST = _Host("AWS g4dn.8xlarge class: 16 cores of Xeon 8259CL, 128 GiB DDR4-2933", 16, 3, 2933e6, 128)
_A10_HOST = _Host("AWS g5.8xlarge class: 16 cores of EPYC 7R32, 128 GiB DDR4-3200", 16, 3, 3200e6, 128)
_4090_HOST = _Host("desktop: Ryzen 9 7950X, 16 cores, 2 channels DDR5-5200, 128 GiB", 16, 2, 5200e6, 128)
_A100_HOST = _Host("one socket: EPYC 7543, 32 cores, 8 channels DDR4-3200, 512 GiB", 32, 8, 3200e6, 512)
_H100_HOST = _Host(
    "one socket: Xeon 8480+, 56 cores, 8 channels DDR5-4800, 1 TiB (DGX H100 has two for eight GPUs)",
    56,
    8,
    4800e6,
    1024,
)


def _gpu_machines() -> tuple[Hardware, ...]:
    return (
        _machine("t4", sheet="NVIDIA T4 data sheet: 16 GB, 320 GB/s, 65 TFLOPS fp16 (no bf16), PCIe 3 x16",
                 memory_mib=15360, hbm=320e9, flops=65e12, pcie=3, processors=40, host=_T4_HOST),
        _machine("a10", sheet="NVIDIA A10 data sheet: 24 GB, 600 GB/s, 125 TFLOPS bf16, PCIe 4 x16",
                 memory_mib=23028, hbm=600e9, flops=125e12, pcie=4, processors=72, host=_A10_HOST),
        _machine("a40", sheet="NVIDIA A40 data sheet: 48 GB, 696 GB/s, 149.7 TFLOPS bf16, PCIe 4 x16",
                 memory_mib=46068, hbm=696e9, flops=149.7e12, pcie=4, processors=84, host=_A100_HOST),
        _machine("l40s", sheet="NVIDIA L40S data sheet: 48 GB, 864 GB/s, 362 TFLOPS bf16 dense, PCIe 4 x16",
                 memory_mib=46068, hbm=864e9, flops=362e12, pcie=4, processors=142, host=_A100_HOST),
        _machine("rtx4090", sheet="NVIDIA Ada whitepaper, RTX 4090: 24 GB, 1008 GB/s, 165.2 TFLOPS bf16 (fp32 sums), "
                 "PCIe 4 x16", memory_mib=24564, hbm=1008e9, flops=165.2e12, pcie=4, processors=128, host=_4090_HOST),
        _machine("a100-40", sheet="NVIDIA A100 data sheet: 40 GB, 1555 GB/s, 312 TFLOPS bf16, PCIe 4 x16",
                 memory_mib=40960, hbm=1555e9, flops=312e12, pcie=4, processors=108, host=_A100_HOST),
        _machine("a100-80", sheet="NVIDIA A100 80GB PCIe data sheet: 80 GB, 1935 GB/s, 312 TFLOPS bf16, PCIe 4 x16",
                 memory_mib=81920, hbm=1935e9, flops=312e12, pcie=4, processors=108, host=_A100_HOST),
        _machine("h100", sheet="NVIDIA H100 SXM data sheet: 80 GB, 3.35 TB/s, 989 TFLOPS bf16 dense, PCIe 5 x16",
                 memory_mib=81559, hbm=3350e9, flops=989e12, pcie=5, processors=132, host=_H100_HOST),
        _machine("h200", sheet="NVIDIA H200 SXM data sheet: 141 GB, 4.8 TB/s, 989 TFLOPS bf16 dense, PCIe 5 x16",
                 memory_mib=143771, hbm=4800e9, flops=989e12, pcie=5, processors=132, host=_H100_HOST),
    )  # fmt: skip


def named_machines() -> tuple[Hardware, ...]:
    """Return all named machines: those with a GPU, then the CPU servers."""
    return (*_gpu_machines(), *cpu_machines())


def machine_names(device: Literal["gpu", "cpu"] | None = None) -> tuple[str, ...]:
    """Return the names of the machines with that device; None: of all."""
    return tuple(machine.name for machine in named_machines() if device in (None, machine.device))


def hardware_of_gpu(gpu: str) -> Hardware | None:
    """Return the named machine whose GPU a driver calls ``gpu``, as "NVIDIA A100-SXM4-80GB"; None if no name fits.

    A mobile GPU, a MIG slice and the slower variants of an H100 share a name with a GPU, but not its rates.
    """
    gpu = gpu.lower()
    words = gpu.replace("rtx ", "rtx").replace("-", " ").split()
    if not {"laptop", "mig", "nvl"}.isdisjoint(words) or {"h100", "pcie"} <= set(words):
        return None
    kinds = {name: name.split("-") for name in machine_names("gpu")}
    fitting = [name for name, (kind, *_) in kinds.items() if kind in words]
    return find_hardware(max(fitting, key=lambda name: kinds[name][-1] in gpu)) if fitting else None


def find_hardware(name_or_path: str | Path) -> Hardware:
    """Return the machine of that name, or the profile in that JSON file.

    Case, spaces, dashes and underscores of a name do not matter. "A100" is a100-80, "4090" is rtx4090.

    Raises:
        ConfigError: no such machine or file, or an invalid profile.
    """
    text = str(name_or_path).strip()
    key = _key(text)
    key = {"4090": "rtx4090", "a100": "a10080", "xeon8480+": "xeon8480"}.get(key, key)
    for machine in named_machines():
        if _key(machine.name) == key:
            return machine
    if text.endswith(".json") or "/" in text or is_file(text):
        return read_hardware(text)
    raise ConfigError(f"hardware {text!r}: no such machine; write {machine_choices()}")


def machine_choices(device: Literal["gpu", "cpu"] | None = None) -> str:
    """List what names a machine with that device, for an error or a hint."""
    return f"one of {', '.join(machine_names(device))}, or the JSON file of 'hybrid profile --hardware'"


def _key(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())
