"""Rendering of simulated traffic in 80 columns: the goodput, a row for each server, and what limits it."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybrid_backend.tools.plan.answer import DRAW, ratio_text
from hybrid_backend.tools.plan.traffic.report import Load, Side, Traffic
from hybrid_backend.tools.plan.traffic.workload import ATTAINMENT

COLUMNS = (
    "holds",
    "requests\nper s",
    "tokens\nper s",
    "TTFT s\np50",
    "\np99",
    "TPOT ms\np50",
    "\np99",
    "full\ntokens/s",
)


def show_traffic(traffic: Traffic, console: Console) -> None:
    """Print the comparison."""
    sides = (traffic.stock, traffic.hybrid)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("\nserver", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name if "\n" in name else f"\n{name}", justify="right", no_wrap=True)
    for side in sides:
        table.add_row(side.name, *_cells(side))
    blocks: list[RenderableType] = [Text(headline(traffic), style="bold"), Text(_load(traffic), style="dim"), Text()]
    blocks += [table, Text(), *(Text(f"- {_alone(side)}") for side in sides if side.ttft is not None)]
    blocks += [Text(f"- {side.name} is limited by {side.limit}") for side in sides]
    console.print(Group(*blocks))


def headline(traffic: Traffic) -> str:
    """Return the comparison of both goodputs, or of both servers at a given rate, in one sentence."""
    stock, hybrid = traffic.stock, traffic.hybrid
    if stock.goodput is None or hybrid.goodput is None:
        met = [f"{side.name} meets the SLO for {_share(side.load)} of the requests" for side in (hybrid, stock)]
        return f"Simulated: {', '.join(met)}."
    goodputs = f"{hybrid.name} serves {_rate(hybrid.goodput)} requests/s within the SLO, stock {_rate(stock.goodput)}"
    if traffic.ratio is None:
        return f"Simulated: {goodputs}."
    text = f"Simulated: {goodputs}: {ratio_text(traffic.ratio)} times stock's goodput."
    is_draw = 1 / DRAW < traffic.ratio < DRAW
    return f"{text} A factor below {DRAW:g} is within the simulation's error." if is_draw else text


def _load(traffic: Traffic) -> str:
    workload, slo = traffic.workload, traffic.slo
    return (
        f"{traffic.model} on {traffic.machine}: prompts of {workload.prompt:,} tokens, answers of {workload.answer:,}, "
        f"Poisson arrivals; SLO for {ATTAINMENT:.0%} of the requests: TTFT {traffic.ttft_limit:.3g} s "
        f"({slo.ttft_times:g} times stock's without load), TPOT {1e3 * slo.tpot_seconds:g} ms; a prompt's KV is "
        f"{traffic.prompt_path}"
    )


def _alone(side: Side) -> str:
    assert side.ttft is not None and side.tpot is not None
    return f"{side.name} without load: TTFT {side.ttft:.3g} s, TPOT {1e3 * side.tpot:.3g} ms"


def _cells(side: Side) -> list[str]:
    load = side.load
    full = "-" if side.full is None else f"{side.full.tokens_per_s:.3g}"
    if load is None:
        return [f"{side.holds:,}", "0" if side.goodput is not None else "-", *["-"] * 5, full]
    times = (load.ttft_p50, load.ttft_p99, 1e3 * load.tpot_p50, 1e3 * load.tpot_p99)
    rate = "-" if load.rate is None else _rate(load.rate)
    return [f"{side.holds:,}", rate, f"{load.tokens_per_s:.3g}", *(f"{value:.3g}" for value in times), full]


def _share(load: Load | None) -> str:
    return f"{load.attainment:.0%}" if load is not None else "none"


def _rate(rate: float) -> str:
    return f"{rate:.2g}"
