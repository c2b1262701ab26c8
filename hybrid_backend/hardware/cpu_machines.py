"""Named CPU servers by their data sheets: the device tier is the CPU itself, so weights and K and V lie in its RAM.

Data sheets: AMD EPYC 7003 and 9004 series (2021, 2022) and Ryzen 7000 series (2022), Intel Xeon Scalable of the 4th
generation (2023). They give cores, base clock, memory channels and transfers per second; a channel is 8 bytes wide.
Operations per cycle and core are those of the widest product that the CPU has: AMX 2,048 in bf16, AVX-512 on Zen 4 64
in bf16, AVX2 32 in fp32.

Share of the peak: STREAM reached 199 of 256 GB/s on two Xeons and 250 of 307 on two EPYCs by their vendors' builds
(AnandTech, "Sizing Up Servers", 2017), which are 78 and 81 %. One core reads 12 GB/s (16.5 to 18 measured:
docs/lab/cpu-kernels.md).
"""

from __future__ import annotations

from hybrid_backend.hardware.spec import Curve, Hardware, Number, saturating

STREAM_SHARE = 0.8
"""Share of the memory channels' peak that sequential reads reach."""
CORE_BYTES_PER_S = 12e9
"""Bytes per second that one core reads at most."""
KERNEL_SHARE = 0.8
"""Share of sequential reads that CPU attention reaches over scattered pages (measured: docs/lab/cpu-kernels.md)."""


def thread_counts(cores: int) -> list[int]:
    """Return the thread counts at which a named machine's curves have points."""
    return [count for count in (1, 2, 4, 8, 16, 32, 64) if count < cores] + [cores]


def _cpu_server(
    name: str, sheet: str, *, cores: int, hertz: float, operations: int, channels: int, transfers: float, ram_gib: int
) -> Hardware:
    """Return a CPU server with all memory channels filled. ``operations`` are those of a core per cycle."""
    peak = channels * 8 * transfers
    channel_read = STREAM_SHARE * peak
    read = min(channel_read, cores * CORE_BYTES_PER_S)
    memory = f"{sheet}: {channels} channels at {transfers / 1e6:.0f} MT/s = {peak / 1e9:.0f} GB/s peak"
    reads = f"{memory}, 80 % as STREAM, {CORE_BYTES_PER_S / 1e9:g} GB/s per core"
    attention = f"{reads}; our kernels read K and V at 80 % of that (docs/lab/cpu-kernels.md)"
    threads = thread_counts(64)  # to where the channels are full, so that `with_cores` goes on from a flat curve
    ram = ram_gib * 2**30
    return Hardware(
        name=name,
        device="cpu",
        device_memory_bytes=Number(value=ram, source="the device tier and the host are one"),
        hbm_bytes_per_s=Number(value=peak, source=memory),
        hbm_efficiency=Number(value=read / peak, source=reads),
        bf16_flops_per_s=Number(value=cores * hertz * operations, source=f"{sheet}; {operations} per cycle and core"),
        emulates_bf16=operations <= 32,
        flops_efficiency=Number(value=0.6, source="general figure: large GEMMs reach 50 to 75 % of the peak"),
        device_attention_bytes_per_s=Curve(points=((1.0, KERNEL_SHARE * read),), source=attention),
        host_device_bytes_per_s=Curve(points=((1.0, read / 2),), source="RAM to RAM: each byte is read and written"),
        host_ram_bytes=Number(value=ram, source=f"{ram_gib} GiB, a usual size"),
        host_read_bytes_per_s=saturating(threads, CORE_BYTES_PER_S, channel_read, reads),
        cpu_attention_bytes_per_s=saturating(
            threads, KERNEL_SHARE * CORE_BYTES_PER_S, KERNEL_SHARE * channel_read, attention
        ),
        layer_overhead_s=Number(value=3e-4, source="compiled SmolLM2, 26 ms a step in 30 layers (docs/lab/peers.md)"),
        step_overhead_s=Number(value=7e-3, source="between two steps on a Xeon with AMX (docs/lab/peers.md)"),
        cpu_job_overhead_s=Number(value=30e-6, source="general figure: flags in memory, threads that spin"),
        cores=cores,
    )


def cpu_machines() -> tuple[Hardware, ...]:
    """Return the named CPU servers, each with one socket."""
    return (
        _cpu_server("ryzen-7950x", "AMD Ryzen 9 7950X: desktop, 16 cores, 4.5 GHz, AVX-512, DDR5-5200",
                    cores=16, hertz=4.5e9, operations=64, channels=2, transfers=5200e6, ram_gib=64),
        _cpu_server("epyc-7313", "AMD EPYC 7313: 16 cores, 3.0 GHz, AVX2, DDR4-3200",
                    cores=16, hertz=3.0e9, operations=32, channels=8, transfers=3200e6, ram_gib=256),
        _cpu_server("epyc-9354", "AMD EPYC 9354: 32 cores, 3.25 GHz, AVX-512, DDR5-4800",
                    cores=32, hertz=3.25e9, operations=64, channels=12, transfers=4800e6, ram_gib=384),
        _cpu_server("xeon-6426y", "Intel Xeon Gold 6426Y: 16 cores, 2.5 GHz, AMX, DDR5-4800",
                    cores=16, hertz=2.5e9, operations=2048, channels=8, transfers=4800e6, ram_gib=256),
        _cpu_server("xeon-8480", "Intel Xeon Platinum 8480+: 56 cores, 2.0 GHz, AMX, DDR5-4800",
                    cores=56, hertz=2.0e9, operations=2048, channels=8, transfers=4800e6, ram_gib=256),
    )  # fmt: skip
