"""The simulator against ScoutAttention's published numbers and against our own measured runs.

    python -m bench.simulate_figures [--out bench/out]

Prints the tables (paper, what could not be checked, how much hangs on the assumed workload, own runs) and writes
`simulate_figures.json` and a PNG with plots: decode throughput by context and by batch, GPU idle, ratios, and measured
against simulated tokens/s.

The values behind the paper's Figures 8 to 12 were not to be had, only numbers that its text states, through its
abstract and two public summaries of it (`SOURCES`). What these leave open was assumed with the numbers in sight, once
for all of them: `WORKLOAD`, HGCA's window and share, InfiniGen's share (our own measurement; the paper says less than
15 %), and that "1.78x -> 1.48x" are the doublings of the batch. So agreement shows that one set of physical rates
explains all numbers; it is no proof. No parameter differs from one number to another.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import paper_numbers
from bench.model_configs import SHAPES
from bench.simulate_runs import own_runs, validation_error
from hybrid_backend.config import HybridConfig
from hybrid_backend.hardware import Curve, Hardware, find_hardware
from hybrid_backend.hardware.shape import shape_from_config
from hybrid_backend.simulate import StepTime, decode_step
from hybrid_backend.simulate.decode import SCOUT_SHARE, WITHOUT_RECALL

SOURCES = {
    "abstract": "ScoutAttention, arXiv 2603.27138, abstract",
    "text": "ScoutAttention's evaluation as two public summaries repeat it (a machine-written one in a daily digest of "
    "arXiv, 31 March 2026; the research notes of another engine); not checked against the paper itself",
}
# The paper's model for speed.
QWEN3_14B = SHAPES["qwen3-14b"]
# The paper: pages of 32, budget 2048, every layer sparse. HGCA there runs in the same engine with the same budget.
CONFIG = HybridConfig.model_validate({"page_size": 32, "budget_tokens": 2048, "hgca": {"window_tokens": 2048}})
CORES = 36
GPU_OVER_CPU = 20.0
"""The text: the CPU computes attention about 20 times slower than the GPU."""
WORKLOAD = (32768, 64)
"""Context and batch, not in our sources. 64 is the largest batch of the paper's sweep (16 to 64)."""
STOCK_ROWS_64K = 4
"""Sequences of 65,536 tokens (10.7 GB each) beside 29.5 GB of weights in 0.88 of 80 GiB, SGLang's share."""
HGCA_SHARE = SCOUT_SHARE * WITHOUT_RECALL
"""HGCA there, assumed: as much on the CPU as scout has without recall, beside a dense window of the budget."""
CONTEXTS = (8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Claim:
    """One published number and the simulation of it."""

    part: str
    what: str
    paper: float
    source: str
    simulated: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.simulated / self.paper - 1.0


def paper_machine() -> Hardware:
    """ "80 GB HBM GPU, PCIe 4 x16" and 36 cores: an A100 80GB PCIe."""
    gpu = find_hardware("a100-80")
    attention = Curve(points=((CORES, gpu.hbm_achieved / GPU_OVER_CPU),), source=f"GPU / {GPU_OVER_CPU:g}: the text")
    return gpu.replace(name="ScoutAttention's machine", cores=CORES, cpu_attention_bytes_per_s=attention)


@lru_cache
def paper_step(method: str, context: int, batch: int, lookahead: bool = True, recall: bool = True) -> StepTime:
    share = HGCA_SHARE if method in ("hgca",) else None
    shape = shape_from_config(QWEN3_14B, "qwen3-14b")
    return decode_step(
        paper_machine(), shape, CONFIG, method, context, batch, cpu_share=share, lookahead=lookahead, recall=recall
    )


def claims(context: int = WORKLOAD[0], batch: int = WORKLOAD[1]) -> list[Claim]:
    """Every number that could be had and checked."""
    scout = paper_step("scout", context, batch)
    hgca = paper_step("hgca", context, batch)
    infinigen = paper_step("infinigen", context, batch)
    ahead_only = paper_step("scout", context, batch, recall=False)
    neither = paper_step("scout", context, batch, recall=False, lookahead=False)
    rate = {rows: paper_step("scout", context, rows).tokens_per_s for rows in (16, 32, 64)}
    ratios = [
        min(paper_step(other, tokens, batch).seconds for other in ("hgca", "infinigen"))
        / paper_step("scout", tokens, batch).seconds
        for tokens in CONTEXTS
    ]
    layers = int(QWEN3_14B["num_hidden_layers"])
    shape = shape_from_config(QWEN3_14B, "qwen3-14b")
    idle = {method: 100 * share for method, share in paper_numbers.IDLE.items()}
    resident = (1 - SCOUT_SHARE) * CONFIG.budget_tokens * shape.token_bytes * batch
    return [
        Claim("layer", "time of a layer, the CPU's window one layer ahead, us", 900, "text",
              scout.device_busy / layers * 1e6),
        Claim("layer", "time of its attention, the CPU's window otherwise, us", 300, "text",
              resident / paper_machine().hbm_achieved * 1e6),
        Claim("by length", "scout over the better of HGCA and InfiniGen, at most (8k to 64k)",
              paper_numbers.OVER_BEST_OFFLOADING, "abstract", max(ratios)),
        Claim("by batch", "scout, batch 32 over 16", 1.78, "text", rate[32] / rate[16]),
        Claim("by batch", "scout, batch 64 over 32", 1.48, "text", rate[64] / rate[32]),
        Claim("idle", "GPU idle, scout, %", idle["scout"], "text", 100 * scout.idle_share),
        Claim("idle", "GPU idle, HGCA, %", idle["hgca"], "text", 100 * hgca.idle_share),
        Claim("idle", "GPU idle, InfiniGen, %", idle["infinigen"], "text", 100 * infinigen.idle_share),
        Claim("Figure 12", "pre-computation (PC) over neither", paper_numbers.PRECOMPUTATION, "text",
              neither.seconds / ahead_only.seconds),
        Claim("Figure 12", "periodic recall (PR) over PC alone", paper_numbers.PERIODIC_RECALL, "text",
              ahead_only.seconds / scout.seconds),
    ]  # fmt: skip


def unchecked() -> list[tuple[str, str]]:
    """What is published and could not be checked, and why."""
    stock = paper_step("stock", 65536, STOCK_ROWS_64K).tokens_per_s
    over = {rows: paper_step("scout", 65536, rows).tokens_per_s / stock for rows in (8, 11, 16, 32, 64)}
    shown = ", ".join(f"{ratio:.1f} at batch {rows}" for rows, ratio in over.items())
    both = (
        paper_step("scout", *WORKLOAD, recall=False, lookahead=False).seconds / paper_step("scout", *WORKLOAD).seconds
    )
    return [
        ("5.1 times FullKV at 64k", f"its batch is not in our sources; simulated: {shown}"),
        ("every other bar and point of Figures 8 to 12", "their values could not be had"),
        ("the CPU's share of blocks, 8.2 % on average", "an input of the simulation, not a result"),
        ("PC and PR together 2.1 (one summary)", f"contradicts 1.39 x 1.20 = 1.67; simulated: {both:.2f}"),
    ]


def sensitivity() -> list[tuple[int, int, float, int]]:
    """Context, batch, the largest error of `claims` and how many of them are above 15 %, were that the workload."""
    rows = []
    for context in CONTEXTS:
        for batch in (32, 40, 64):
            errors = [abs(claim.error) for claim in claims(context, batch)]
            rows.append((context, batch, max(errors), sum(error > 0.15 for error in errors)))
    return rows


def show(console: Console) -> None:
    table = Table("part", "what", "paper", "simulated", "error", "source", title="ScoutAttention, published numbers")
    for c in claims():
        table.add_row(c.part, c.what, f"{c.paper:g}", f"{c.simulated:.3g}", f"{c.error:+.0%}", c.source)
    console.print(table)
    for key, source in SOURCES.items():
        console.print(f"{key}: {source}", highlight=False)
    table = Table("published", "why it was not checked", title="Not checked")
    for what, why in unchecked():
        table.add_row(what, why)
    console.print(table)
    table = Table("context", "batch", "largest error", "above 15 %", title="Were another workload assumed")
    for context, batch, worst, above in sensitivity():
        table.add_row(str(context), str(batch), f"{worst:.0%}", f"{above} of {len(claims())}")
    console.print(table)
    runs = own_runs()
    table = Table(
        "model", "context", "batch", "method", "measured", "simulated", "error", title="Our own runs, tokens/s"
    )
    for r in runs:
        error = "fitted" if r.fitted else f"{r.error:+.0%}"
        table.add_row(r.model, str(r.context), str(r.batch), r.method, f"{r.measured:g}", f"{r.simulated:.1f}", error)
    console.print(table)
    mean, worst = validation_error(runs)
    console.print(f"validation error of the rows that nothing was fitted to: mean {mean:.0%}, largest {worst:.0%}")


def plot(out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(16, 9))
    contexts, batches = CONTEXTS, (16, 32, 48, 64)
    methods = ("scout", "hgca", "infinigen")
    series: list[tuple[Any, tuple[int, ...], Callable[[str, int], StepTime], str]] = [
        (axes[0, 0], contexts, lambda m, x: paper_step(m, x, 64), "context, tokens (batch 64)"),
        (axes[0, 1], batches, lambda m, x: paper_step(m, WORKLOAD[0], x), "batch (32k tokens)"),
    ]
    for axis, xs, step, label in series:
        for method in methods:
            axis.plot(xs, [step(method, x).tokens_per_s for x in xs], marker="o", label=method)
        axis.set(xlabel=label, ylabel="simulated tokens/s", ylim=(0, None), title="decode throughput, Qwen3-14B")
    shape = shape_from_config(QWEN3_14B, "qwen3-14b")
    room = 0.88 * 80 * 2**30 - shape.weight_bytes
    rows = [min(64, int(room // (x * shape.token_bytes * shape.layers))) for x in contexts]
    stock = [paper_step("stock", x, b).tokens_per_s for x, b in zip(contexts, rows, strict=True)]
    axes[0, 0].plot(contexts, stock, marker="o", label="stock, what fits")
    axes[0, 0].legend()
    axes[0, 1].legend()
    found = claims()
    groups = (
        (axes[0, 2], [c for c in found if c.part in ("idle",)], "GPU idle, %"),
        (axes[1, 0], [c for c in found if c.paper < 5], "ratios"),
        (axes[1, 1], [c for c in found if c.part in ("layer",)], "layer and its attention, us"),
    )
    for axis, mine, title in groups:
        places = range(len(mine))
        axis.bar([x - 0.2 for x in places], [c.paper for c in mine], 0.4, label="paper")
        axis.bar([x + 0.2 for x in places], [c.simulated for c in mine], 0.4, label="simulated")
        axis.set_xticks(list(places), [textwrap.fill(c.what, 20) for c in mine], fontsize=7)
        axis.set_title(title)
        axis.legend()
    runs = own_runs()
    axis = axes[1, 2]
    for method, mark in (("stock", "o"), ("scout", "s")):
        mine = [run for run in runs if run.method in (method,)]
        axis.plot([r.measured for r in mine], [r.simulated for r in mine], mark, label=method)
    axis.plot([0, 80], [0, 80], color="grey", linewidth=0.8)
    axis.set(xlabel="measured tokens/s", ylabel="simulated", title="our own runs, two CPU cores")
    axis.legend()
    figure.tight_layout()
    figure.savefig(out / "simulate_figures.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    options = parser.parse_args()
    console = Console(width=None)
    show(console)
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        "claims": [{**asdict(claim), "error": claim.error} for claim in claims()],
        "unchecked": unchecked(),
        "sensitivity": sensitivity(),
        "own_runs": [{**asdict(run), "error": run.error} for run in own_runs()],
        "validation_error": validation_error(own_runs()),
    }
    (options.out / "simulate_figures.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(options.out)
    console.print(f"written to {options.out}/simulate_figures.json and .png")


if __name__ == "__main__":
    main()
