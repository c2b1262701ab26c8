"""The simulator against ScoutAttention's, CLO's and APEX's numbers and against our own measured runs.

    python -m bench.simulate_figures [--out bench/out]

Prints for each paper its numbers with their workload, what the paper leaves open and was assumed, the simulated
value, its error and where that comes from (ScoutAttention: `bench.simulate_paper`; CLO: `bench.simulate_clo`; APEX:
`bench.simulate_apex`); its statements in words; what other readings of the text would give; our own runs
(`bench.simulate_runs`); and our step by its parts (`bench.simulate_step`). Writes `simulate_figures.json` and PNGs with
plots: decode throughput by context and by batch, GPU idle, ratios, measured against simulated tokens/s, and the parts.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import simulate_apex as apex
from bench import simulate_clo as clo
from bench import simulate_paper as paper
from bench import simulate_step
from bench.simulate_runs import own_runs, validation_error
from hybrid_backend.tools.plan.simulate import StepTime


def show_paper(console: Console, name: str, source: ModuleType) -> None:
    """Print a paper, whose module ``source`` has the functions of `bench.simulate_paper`."""
    claims = source.claims()
    table = Table("section", "what", "workload in the paper", "assumed beside it", "paper", "simulated", "error",
                  title=f"{name}, the numbers of its text")  # fmt: skip
    for c in claims:
        table.add_row(
            c.source,
            c.what,
            c.workload or "-",
            c.assumed or "-",
            f"{c.paper:.3g}",
            f"{c.simulated:.3g}",
            f"{c.error:+.0%}",
        )
    console.print(table)
    table = Table("what", "error", "where it comes from, as far as known", title=f"{name}: what disagrees, and why")
    for c in claims:
        if c.why:
            table.add_row(c.what, f"{c.error:+.0%}", c.why)
    console.print(table)
    table = Table("section", "statement", "assumed", "simulated", "holds", title=f"{name}, in words")
    for s in source.statements():
        simulated = s.simulated if s.holds else f"{s.simulated}. {s.why}"
        table.add_row(s.source, s.what, s.assumed or "-", simulated, "yes" if s.holds else "NO")
    console.print(table)
    table = Table("what", "were it", "paper", "simulated", title=f"{name}: other readings of what it leaves open")
    for o in source.otherwise():
        table.add_row(o.what, o.instead, f"{o.paper:.3g}", f"{o.simulated:.3g}")
    console.print(table)
    table = Table("published", "why", title=f"{name}: not checked")
    for what, why in source.unchecked():
        table.add_row(what, why)
    console.print(table)


def show(console: Console) -> None:
    show_paper(console, "ScoutAttention", paper)
    show_paper(console, "CLO", clo)
    show_paper(console, "APEX", apex)
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
    contexts, batches = paper.CONTEXTS, (16, 32, 48, 64)
    methods = ("scout", "hgca", "infinigen")
    series: list[tuple[Any, tuple[int, ...], Callable[[str, int], StepTime], str]] = [
        (axes[0, 0], contexts, lambda m, x: paper.step(m, x, min(paper.BATCH, paper.fits(m, x))),
         f"context, tokens (at most {paper.BATCH} sequences)"),
        (axes[0, 1], batches, lambda m, x: paper.step(m, paper.LENGTH, x), "batch (32k tokens)"),
    ]  # fmt: skip
    for axis, xs, step, label in series:
        for method in methods:
            axis.plot(xs, [step(method, x).tokens_per_s for x in xs], marker="o", label=method)
        axis.set(xlabel=label, ylabel="simulated tokens/s", ylim=(0, None), title="decode throughput, Qwen3-14B")
    axes[0, 0].plot(contexts, [paper.figure_8("stock", x) for x in contexts], marker="o", label="stock, what fits")
    axes[0, 0].legend()
    axes[0, 1].legend()
    found = paper.claims()
    groups = (
        (axes[0, 2], [c for c in found if c.what.startswith("GPU idle")], "GPU idle, %"),
        (axes[1, 0], [c for c in found if c.source.startswith(("4.3", "abstract")) and "idle" not in c.what], "ratios"),
        (axes[1, 1], [c for c in found if c.source.startswith("3.3")], "Qwen3-32B, us"),
    )
    for axis, mine, title in groups:
        places = range(len(mine))
        axis.bar([x - 0.2 for x in places], [c.paper for c in mine], 0.4, label="paper")
        axis.bar([x + 0.2 for x in places], [c.simulated for c in mine], 0.4, label="simulated")
        axis.set_xticks(list(places), [textwrap.fill(c.what, 12) for c in mine], fontsize=6)
        axis.set_title(title)
        axis.legend()
    runs = own_runs()
    axis = axes[1, 2]
    for method, mark in (("stock", "o"), ("scout", "s")):
        those = [run for run in runs if run.method in (method,)]
        axis.plot([r.measured for r in those], [r.simulated for r in those], mark, label=method)
    axis.plot([0, 80], [0, 80], color="grey", linewidth=0.8)
    axis.set(xlabel="measured tokens/s", ylabel="simulated", title="our own runs, two CPU cores")
    axis.legend()
    figure.tight_layout()
    figure.savefig(out / "simulate_figures.png", dpi=110)


def as_json(source: ModuleType) -> dict[str, Any]:
    """Return as JSON the values that `show_paper` prints."""
    return {
        "claims": [{**asdict(claim), "error": claim.error} for claim in source.claims()],
        "statements": [asdict(statement) for statement in source.statements()],
        "otherwise": [asdict(reading) for reading in source.otherwise()],
        "unchecked": source.unchecked(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    options = parser.parse_args()
    console = Console(width=None)
    show(console)
    simulate_step.show(Console(width=200))
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        **as_json(paper),
        "clo": as_json(clo),
        "apex": as_json(apex),
        "own_runs": [{**asdict(run), "error": run.error} for run in own_runs()],
        "validation_error": validation_error(own_runs()),
        "step": {title: rows() for title, rows in simulate_step.TABLES.items()},
    }
    (options.out / "simulate_figures.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(options.out)
    simulate_step.plot(options.out / "simulate_step.png")
    (options.out / "simulate_step.md").write_text(simulate_step.text())
    console.print(f"written to {options.out}/simulate_figures.json and .png")


if __name__ == "__main__":
    main()
