"""A decode step of `scout` on three GPUs, part by part: as it was, as it is, and what each part costs.

    make simulate

Qwen3-14B with its shipped configuration, 65,536 tokens, 32 sequences or as many as the GPU serves. What is whole and
how many frames there are is what the code at start would choose (`engines/vllm/card.py`). NOTHING OF IT WAS MEASURED ON
A GPU: rates are data sheets', overheads have their sources in `hybrid_backend/tools/plan/simulate/overheads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.simulate_paper import QWEN3_14B
from hybrid_backend.config import HybridConfig, resolve_config
from hybrid_backend.engines.vllm.blocks import Blocks
from hybrid_backend.engines.vllm.card import Card
from hybrid_backend.engines.vllm.footprint import Room, default_chunk
from hybrid_backend.hardware import Curve, Hardware, Number, find_hardware
from hybrid_backend.step.method import frames_per_request
from hybrid_backend.tools.plan.report import Request, make_plan
from hybrid_backend.tools.plan.simulate import PARTS, Overheads, StepTime, decode_step
from hybrid_backend.tools.plan.simulate.decode import SCOUT_SHARE
from hybrid_backend.tools.plan.simulate.overheads import ASLEEP_S, Launches

MACHINES = {"a100-80": "A100-80", "h200": "H200", "l40s": "L40S"}
CONTEXT, BATCH = 65536, 32
CONFIG: HybridConfig = resolve_config("qwen3-14b", None, {}, ())[0]
BEFORE = Overheads(
    launches={"scout": Launches(63, 63)}, selection_s=107e-6, copy_programs=1 << 20, wake_s=ASLEEP_S, partial_bytes=4.0,
    selects_beside=False,
)  # fmt: skip
"""Our step before it was rewritten: 63 nodes a layer (counted), a search by 33 passes over the scores (ESTIMATE: 75 us
beside 32), copies by as many programs as there are pieces, so that they keep all processors, workers asleep between
layers, one stream, partials in fp32."""
MOST_IDLE = 0.06


@dataclass(frozen=True)
class Served:
    """Settings with which a GPU starts to serve a host pool of ``pool`` sequences."""

    machine: Hardware
    config: HybridConfig
    pool: int
    requests: int  # at once

    @property
    def whole(self) -> int:
        layers = self.config.whole_layers
        return len(self.config.exact_layers if layers == "auto" else layers)

    @property
    def frames(self) -> int:
        return frames_per_request(self.config)


@lru_cache
def served(name: str, pool: int) -> Served:
    """Return the settings on the machine of that name, with at most `BATCH` sequences in flight."""
    machine = find_hardware(name)
    device, blocks = int(machine.device_memory_bytes.value), Blocks.of(QWEN3_14B, CONFIG.page_size)
    room = Room(device, int(machine.host_ram_bytes.value), default_chunk(device))
    host = blocks.pool(CONTEXT, pool, room.in_flight) * blocks.block_bytes
    card = Card(QWEN3_14B, blocks, room, host, CONTEXT)
    config, _ = card.with_whole_layers(CONFIG, BATCH)
    requests = card.requests(config, min(BATCH, pool))
    return Served(machine, card.filled(config, requests), pool, requests)


@lru_cache
def chosen(name: str) -> Served:
    """Return the settings with the largest host pool of up to `BATCH` sequences that the GPU runs all at once.

    The exact layers are whole on the device.
    """
    for pool in range(BATCH, 0, -1):
        found = served(name, pool)
        if found.requests == pool and found.whole == len(CONFIG.exact_layers):
            return found
    raise ValueError(f"{name}: not even one sequence of {CONTEXT} tokens fits")


@lru_cache
def stock(name: str) -> StepTime:
    """Return the step of the stock engine with as many sequences as fit."""
    machine = find_hardware(name)
    plan = make_plan(Request(QWEN3_14B, CONFIG, CONTEXT, 1, None, None, machine, methods=("scout",)))
    return decode_step(machine, QWEN3_14B, CONFIG, "stock", CONTEXT, plan.row("stock").max_batch)


def step(at: Served, overheads: Overheads | None = None, cpu_share: float | None = None) -> StepTime:
    return decode_step(
        at.machine, QWEN3_14B, at.config, "scout", CONTEXT, at.requests, overheads=overheads, cpu_share=cpu_share
    )  # fmt: skip


def now(name: str) -> StepTime:
    return step(chosen(name))


def before(name: str) -> StepTime:
    """Return the step of the same requests with the exact layers beyond their 67 frames on the CPU."""
    at = chosen(name)
    selection = at.config.selection.model_copy(update={"digest": "minmax"})
    config = at.config.model_copy(update={"whole_layers": (), "frames_per_request": "auto", "selection": selection})
    return step(replace(at, config=config), BEFORE)


def columns() -> dict[str, tuple[str, StepTime]]:
    """Return the machine and its step by title."""
    found: dict[str, tuple[str, StepTime]] = {}
    for name, title in MACHINES.items():
        for what, of in (("stock", stock), ("before", before), ("now", now)):
            found[f"{title} {what}"] = name, of(name)
    return found


def over_stock(name: str, at: StepTime) -> float:
    return at.tokens_per_s / stock(name).tokens_per_s


def stalls(at: StepTime) -> float:
    """Return the share of the step in which the device waits for workers or copies."""
    return at.parts["waits"] / at.seconds


def parts_table() -> list[tuple[str, ...]]:
    """Return the table's rows: a part's name, then milliseconds in every column; a header first."""
    steps = columns()
    rows = [("ms", *steps)]
    rows += [(part, *(f"{1e3 * at.parts.get(part, 0.0):.2f}" for _, at in steps.values())) for part in PARTS]
    rows.append(("**a step**", *(f"{1e3 * at.seconds:.1f}" for _, at in steps.values())))
    rows.append(("sequences", *(str(at.batch) for _, at in steps.values())))
    rows.append(("tokens/s", *(f"{at.tokens_per_s:.0f}" for _, at in steps.values())))
    rows.append(("**over stock**", *(f"{over_stock(name, at):.1f}" for name, at in steps.values())))
    rows.append(("idle, %", *(f"{100 * at.idle_share:.1f}" for _, at in steps.values())))
    rows.append(("of that waits, %", *(f"{100 * stalls(at):.1f}" for _, at in steps.values())))
    return rows


def ablations(name: str) -> dict[str, StepTime]:
    """Return today's step with one thing changed."""
    at, usual = chosen(name), Overheads()
    quiet = at.machine.replace(cpu_job_overhead_s=Number(value=0, source="switched off"))
    ready = at.machine.replace(step_overhead_s=Number(value=0, source="switched off"))
    rate = Curve(points=((1.0, 0.6 * at.machine.hbm_bytes_per_s.value),), source="what if: 60 % of the peak, not 80")
    slow = at.machine.replace(device_attention_bytes_per_s=rate)
    not_whole = at.config.model_copy(update={"whole_layers": ()})
    return {
        "no launches (kernels that are not bytes, selection)": step(at, usual.without("launches")),
        "no gaps between nodes": step(at, usual.without("gaps")),
        "copies take nothing from the step": step(at, usual.without("contention")),
        "no flags, no wake-up": step(replace(at, machine=quiet), usual.without("flags")),
        "CPU's partial in 4 bytes": step(at, replace(usual, partial_bytes=4.0)),
        "selections in the step's own stream": step(at, replace(usual, selects_beside=False)),
        "CPU's partial free": step(at, usual.without("CPU partial")),
        "no time of the engine between steps": step(replace(at, machine=ready)),
        "workers asleep between layers": step(at, replace(usual, wake_s=ASLEEP_S)),
        "63 launches a layer": step(at, replace(usual, launches=BEFORE.launches)),
        "twice the share on the CPU": step(at, cpu_share=2 * SCOUT_SHARE),
        "our attention at 60 % of the peak": step(replace(at, machine=slow)),
        "exact layers not whole": step(replace(at, config=not_whole)),
    }


def ablation_table() -> list[tuple[str, ...]]:
    """Return rows of a change, and for each machine the change of the step and the ratio to stock."""
    by_machine = {name: (now(name), ablations(name)) for name in MACHINES}
    titles = [text for title in MACHINES.values() for text in (f"{title}, ms", "over stock")]
    rows = [("today's step with", *titles)]
    for what in next(iter(by_machine.values()))[1]:
        cells = []
        for name, (today, changed) in by_machine.items():
            at = changed[what]
            cells += [f"{1e3 * (at.seconds - today.seconds):+.2f}", f"{over_stock(name, at):.2f}"]
        rows.append((what, *cells))
    return rows


@dataclass(frozen=True)
class Target:
    """A promise, and the simulated value."""

    what: str
    machine: str
    wanted: float
    simulated: float
    is_least: bool = True  # else at most

    @property
    def is_met(self) -> bool:
        return self.simulated >= self.wanted if self.is_least else self.simulated <= self.wanted

    @property
    def row(self) -> tuple[str, ...]:
        wanted = f"{'>=' if self.is_least else '<='} {self.wanted:g}"
        return self.what, MACHINES[self.machine], wanted, f"{self.simulated:.1f}", "yes" if self.is_met else "**no**"


def targets() -> list[Target]:
    found = [
        Target("times stock", "a100-80", 6, over_stock("a100-80", now("a100-80"))),
        Target("times stock", "l40s", 5.1, over_stock("l40s", now("l40s"))),
        Target(f"times stock, host pool for {BATCH}", "l40s", 5.1, over_stock("l40s", step(served("l40s", BATCH)))),
    ]
    for name in MACHINES:
        found.append(Target("idle, %", name, 100 * MOST_IDLE, 100 * now(name).idle_share, is_least=False))
        found.append(Target("waits, %", name, 100 * MOST_IDLE, 100 * stalls(now(name)), is_least=False))
    return found


def auto_pool(name: str) -> int:
    """Return the sequences in a host pool of ``host_pool.size: auto``: half of the memory beside the weights."""
    return int((find_hardware(name).host_ram_bytes.value - QWEN3_14B.weight_bytes) / 2**31 / pool_gib(1))


def choices() -> list[tuple[str, ...]]:
    """Return the settings at start for three host pools: all sequences that run at once, ``auto``, and `BATCH`."""
    rows: list[tuple[str, ...]] = [
        ("GPU", "host of", "host pool", "exact layers whole", "frames", "at once", "tokens/s", "over stock")
    ]
    for name, title in MACHINES.items():
        pools = {auto_pool(name): " (auto)", BATCH: "", chosen(name).pool: ""}
        for pool, why in sorted(pools.items()):
            at = served(name, pool)
            found = step(at)
            rows.append((
                title, f"{at.machine.host_ram_bytes.value / 2**30:.0f} GiB",
                f"{pool} x 64k, {pool_gib(pool):.0f} GiB{why}", f"{at.whole} of 2", str(at.frames), str(at.requests),
                f"{found.tokens_per_s:.0f}", f"{over_stock(name, found):.1f}",
            ))  # fmt: skip
    return rows


def pool_gib(sequences: int) -> float:
    return sequences * CONTEXT * QWEN3_14B.token_bytes * QWEN3_14B.layers / 2**30


def most_share(name: str) -> float:
    """Return the CPU's largest share of the budget with which the device waits for at most `MOST_IDLE` of a step."""
    low, high = 0.0, 0.99
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if stalls(step(chosen(name), cpu_share=middle)) <= MOST_IDLE else (low, middle)
    return low


TABLES: Mapping[str, Callable[[], list[tuple[str, ...]]]] = {
    "What the code at start chooses": choices,
    "A step by its parts": parts_table,
    "What each part costs": ablation_table,
    "Targets": lambda: [("what", "GPU", "wanted", "simulated", "met"), *(target.row for target in targets())],
    "Share of the budget on the CPU from which on the device waits for 6 % of a step": lambda: [
        ("GPU", "share", "assumed"),
        *((title, f"{100 * most_share(name):.0f} %", f"{100 * SCOUT_SHARE:.1f} %") for name, title in MACHINES.items()),
    ],
}


def text() -> str:
    """Return all tables, as docs/cuda.md has them."""

    def lines(rows: list[tuple[str, ...]]) -> list[str]:
        found = ["| " + " | ".join(row) + " |" for row in rows]
        return [found[0], "|" + " --- |" * len(rows[0]), *found[1:]]

    return "\n".join(line for title, rows in TABLES.items() for line in (f"{title}:", "", *lines(rows()), ""))


def show(console: Console) -> None:
    for title, rows_of in TABLES.items():
        header, *rows = rows_of()
        table = Table(*header, title=f"{QWEN3_14B.name}, {CONTEXT:,} tokens: {title}")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def plot(path: Path) -> None:
    """Draw a bar for each step, by its parts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = columns()
    figure, axis = pyplot.subplots(figsize=(11, 5))
    left, colours = [0.0] * len(steps), pyplot.get_cmap("tab20")
    for at, part in enumerate(PARTS):
        widths = [1e3 * found.parts.get(part, 0.0) for _, found in steps.values()]
        axis.barh(list(steps), widths, left=left, label=part, color=colours(at))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for at, (name, found) in enumerate(steps.values()):
        label = f" {found.batch} x 64k, {over_stock(name, found):.1f} x stock"
        axis.text(left[at], at, label, va="center", fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="simulated ms of a decode step", title=f"{QWEN3_14B.name}, {CONTEXT:,} tokens", xlim=(0, 215))
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
