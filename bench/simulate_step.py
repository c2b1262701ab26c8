"""The simulator's decode step of Qwen3-14B on three GPUs, part by part, and our own measured runs beside its times.

    make simulate

Qwen3-14B with its shipped configuration, 65,536 tokens, 32 sequences or as many as the GPU serves. Whole layers and
frames are what the code at start would choose (`memory_plan/device.py`). Rates are those of data sheets: nothing of the
tables of docs/lab/cuda.md was measured on these GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from bench.simulate_runs import gpu_table, own_runs, validation_error
from hybrid_backend.config import HybridConfig, resolve_config
from hybrid_backend.hardware import Hardware, find_hardware
from hybrid_backend.memory_plan.blocks import Blocks
from hybrid_backend.memory_plan.device import DevicePlan
from hybrid_backend.memory_plan.footprint import MemoryRoom, default_chunk
from hybrid_backend.step.method import frames_per_request
from hybrid_backend.tools.plan.model import find_shape
from hybrid_backend.tools.plan.report import Request, make_plan
from hybrid_backend.tools.plan.simulate import PARTS, StepTime, decode_step

QWEN3_14B = find_shape("qwen3-14b")
MACHINES = {"a100-80": "A100-80", "h200": "H200", "l40s": "L40S"}
CONTEXT, BATCH = 65536, 32
CONFIG: HybridConfig = resolve_config("qwen3-14b", None, {}, ("method=scout",))[0].for_layers(
    QWEN3_14B.attention_windows
)
Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Served:
    """What the code at start makes of a GPU and a host pool of ``pool`` sequences."""

    machine: Hardware
    config: HybridConfig
    pool: int
    requests: int

    @property
    def whole(self) -> int:
        layers = self.config.whole_layers
        return len(self.config.exact_layers if layers == "auto" else layers)

    @property
    def frames(self) -> int:
        return frames_per_request(self.config)


@lru_cache
def served(name: str, pool: int) -> Served:
    """Return what serves at most `BATCH` sequences on the machine of that name."""
    machine = find_hardware(name)
    device, blocks = int(machine.device_memory_bytes.value), Blocks.of(QWEN3_14B, CONFIG.page_size)
    room = MemoryRoom(device, int(machine.host_ram_bytes.value), default_chunk(device))
    host = blocks.pool(CONTEXT, pool, room.in_flight) * blocks.block_bytes
    card = DevicePlan(QWEN3_14B, blocks, room, host, CONTEXT)
    config, _ = card.with_whole_layers(CONFIG, BATCH)
    requests = card.requests(config, min(BATCH, pool))
    return Served(machine, card.filled(config, requests), pool, requests)


@lru_cache
def chosen(name: str) -> Served:
    """Return the largest host pool of up to `BATCH` sequences that the GPU runs at once with exact layers whole."""
    for pool in range(BATCH, 0, -1):
        candidate = served(name, pool)
        if candidate.requests == pool and candidate.whole == len(CONFIG.exact_layers):
            return candidate
    raise ValueError(f"{name}: not even one sequence of {CONTEXT} tokens fits")


@lru_cache
def stock(name: str) -> StepTime:
    """Return the step of the stock engine with as many sequences as fit."""
    machine = find_hardware(name)
    plan = make_plan(Request(QWEN3_14B, CONFIG, CONTEXT, 1, None, None, machine, methods=("scout",)))
    return decode_step(machine, QWEN3_14B, CONFIG, "stock", CONTEXT, plan.row("stock").max_batch)


def step(server: Served, cpu_share: float | None = None) -> StepTime:
    """Return the step of `scout`."""
    return decode_step(server.machine, QWEN3_14B, server.config, "scout", CONTEXT, server.requests, cpu_share=cpu_share)


def steps() -> dict[str, tuple[str, StepTime]]:
    """Return the machine and the step of each column."""
    return {
        f"{title} {method}": (name, stock(name) if method == "stock" else step(chosen(name)))
        for name, title in MACHINES.items()
        for method in ("stock", "scout")
    }


def over_stock(name: str, scout: StepTime) -> float:
    return scout.tokens_per_s / stock(name).tokens_per_s


def stalls(scout: StepTime) -> float:
    """Return the share of the step in which the device waits: what ScoutAttention's Figure 11 calls idle."""
    return scout.part_seconds["waits"] / scout.seconds


def parts_table() -> Rows:
    """Return a part's name and its milliseconds in each column."""
    columns = steps()
    rows = [("ms", *columns)]
    rows += [(part, *(f"{1e3 * x.part_seconds.get(part, 0.0):.2f}" for _, x in columns.values())) for part in PARTS]
    rows.append(("**a step**", *(f"{1e3 * x.seconds:.1f}" for _, x in columns.values())))
    rows.append(("sequences", *(str(x.batch) for _, x in columns.values())))
    rows.append(("tokens/s", *(f"{x.tokens_per_s:.0f}" for _, x in columns.values())))
    rows.append(("**over stock**", *(f"{over_stock(name, x):.1f}" for name, x in columns.values())))
    rows.append(("idle, %", *(f"{100 * x.idle_share:.1f}" for _, x in columns.values())))
    rows.append(("of that waits, %", *(f"{100 * stalls(x):.1f}" for _, x in columns.values())))
    return rows


def pool_gib(sequences: int) -> float:
    return sequences * CONTEXT * QWEN3_14B.token_bytes * QWEN3_14B.layers / 2**30


def auto_pool(name: str) -> int:
    """Return the sequences of ``host_pool.size: auto``: half of what the weights leave of the host's memory."""
    return int((find_hardware(name).host_ram_bytes.value - QWEN3_14B.weight_bytes) / 2**31 / pool_gib(1))


def choices_table() -> Rows:
    """Return what the code at start chooses with several sizes of the host pool."""
    rows: Rows = [("GPU", "host of", "host pool", "exact layers whole", "frames", "at once", "tokens/s", "over stock")]
    for name, title in MACHINES.items():
        pools = {auto_pool(name): " (auto)", BATCH: "", chosen(name).pool: ""}
        for pool, note in sorted(pools.items()):
            server = served(name, pool)
            scout = step(server)
            rows.append((
                title, f"{server.machine.host_ram_bytes.value / 2**30:.0f} GiB",
                f"{pool} x 64k, {pool_gib(pool):.0f} GiB{note}", f"{server.whole} of 2", str(server.frames),
                str(server.requests), f"{scout.tokens_per_s:.0f}", f"{over_stock(name, scout):.1f}",
            ))  # fmt: skip
    return rows


def runs_table() -> Rows:
    """Return our own runs on a CPU (docs/lab/simulator.md)."""
    rows: Rows = [("model", "context", "batch", "method", "measured", "simulated", "error")]
    for run in own_runs():
        error = "fitted" if run.fitted else f"{100 * run.error:+.0f} %"
        numbers = (f"{run.context:,}", str(run.batch), run.method, f"{run.measured:g}", f"{run.simulated:.1f}")
        rows.append((run.model, *numbers, error))
    return rows


TABLES: Mapping[str, Callable[[], Rows]] = {
    "What the code at start chooses": choices_table,
    "A step by its parts": parts_table,
}


def text(rows: Rows) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:], ""])


def main() -> None:
    for title, table in {**TABLES, "Own runs on an H200": gpu_table, "Own runs on a CPU": runs_table}.items():
        print(f"{title}:\n\n{text(table())}")
    mean, worst = validation_error(own_runs())
    print(f"Rows that nothing was fitted to: mean error {100 * mean:.0f} %, largest {100 * worst:.0f} %")


if __name__ == "__main__":
    main()
