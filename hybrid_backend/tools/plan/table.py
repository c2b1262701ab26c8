"""Rendering of a plan in 80 columns: the answer, a row for each method, notes and the command that serves it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybrid_backend.tools.plan.answer import (
    answer,
    bound,
    duration,
    headline,
    meaning,
    prompts,
    ratio_text,
    times_stock,
)
from hybrid_backend.tools.plan.report import BF16_EMULATION, Plan, Row, serve_flags

_MARK = {"exact": "", "at most": "<= ", "estimate": "~ "}
_RAM_SOURCES = {
    "asked": "",
    "machine": ", all that the machine has; --ram plans with less",
    "free": ", which is free here now; --ram plans with another size",
}
_MEMORY_COLUMNS = ("fits", "device\nGiB", "host\nGiB", "largest\nbatch", "longest\ncontext")
_SPEED_COLUMNS = ("ms per\ntoken", "tokens\nper s", "best\nper s", "times\nstock")
COLUMNS = (*_MEMORY_COLUMNS, *_SPEED_COLUMNS)


def show(plan: Plan, serve: Sequence[str], console: Console) -> None:
    """Print the answer, what bounds it, the methods and the command that serves the plan.

    Args:
        plan: what to print.
        serve: words of the user's command line that `hybrid serve` needs too: the model, the configuration.
        console: where to print.
    """
    chosen = answer(plan)
    blocks: list[RenderableType] = [Text(headline(plan), style="bold")]
    if chosen is not None:
        if sentences := list(filter(None, (meaning(plan, chosen), prompts(plan)))):
            blocks.append(Text(" ".join(sentences)))
        blocks += [Text(bound(plan, chosen)), Text(_memory(chosen, "device") or _memory(chosen, "host"))]
    blocks += [Text(_load(plan), style="dim"), Text(), _methods(plan), Text()]
    blocks += [Text(f"- {note}") for note in _notes(plan)]
    served = next((row for row in plan.rows if row.fits and row.name == plan.configured), None)
    if served is not None:
        words = ["hybrid", "serve", *(serve or [plan.model.name]), *serve_flags(served, plan)]
        blocks.append(Text(_command(words, console.width), style="dim", no_wrap=True, overflow="ignore"))
    console.print(Group(*blocks), crop=False)  # A line with a long path must not be cut.


def size(count: float) -> str:
    """Write a number of bytes with a unit."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count / 2**10:.4g} KiB"


def _command(words: Sequence[str], width: int) -> str:
    """Write a command line that can be copied, with a backslash at each break."""
    lines = [""]
    for word in map(shlex.quote, words):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1].strip() and len(longer) > width - 2:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] = longer
    return "\n".join(lines)


def _load(plan: Plan) -> str:
    machine = f" on {plan.machine}" if plan.machine else ""
    devices = f" ({plan.devices} devices, memory is of one)" if plan.devices > 1 else ""
    device = f"device {size(plan.device_limit)}, " if plan.device_limit else "no device memory, "
    return (
        f"{plan.model.name}{machine}{devices}: {plan.batch} x {plan.context:,} tokens, {plan.model.dtype}; "
        f"{device}host {size(plan.host_limit)}{_RAM_SOURCES[plan.host_limit_source]}"
    )


def _memory(row: Row, place: str) -> str:
    """List the items in host memory or device memory, largest first."""
    items = sorted((item for item in row.items if item.place == place), key=lambda item: -item.bytes)
    listed = ", ".join(f"{item.name} {_MARK[item.kind]}{size(item.bytes)}" for item in items)
    return f"{row.name}, {place} memory: {listed}" if items else ""


def _methods(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("\nmethod", no_wrap=True)
    for name in COLUMNS if plan.has_times else _MEMORY_COLUMNS:
        table.add_column(name if "\n" in name else f"\n{name}", justify="right", no_wrap=True)
    for row in plan.rows:
        table.add_row(row.name, *(["refused"] if row.refused else _cells(plan, row)))
    return table


def _cells(plan: Plan, row: Row) -> list[str]:
    cells = [
        "yes" if row.fits else "no",
        _gib(row.device_bytes),
        _gib(row.host_bytes),
        _number(row.max_batch),
        _number(row.max_context),
    ]
    if plan.has_times:
        times = times_stock(plan, row)
        cells += [_number(row.step_ms), _number(row.tokens_per_s), _number(row.best_tokens_per_s)]
        cells.append("-" if times is None else ratio_text(times))
    return cells


def _number(value: float | None) -> str:
    """Write a number in at most seven characters."""
    if value is None:
        return "-"
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if value >= 1e2 * factor:
            return f"{value / factor:,.0f}{unit}"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3g}"


def _gib(size: float) -> str:
    """Write bytes as GiB in at most five characters."""
    return _number(size / 2**30) if size < 1e4 * 2**30 else f"{size / 2**30 / 1e3:,.3g}k"


def _exactness(plan: Plan, row: Row, exact_tokens: int) -> str:
    """Tell up to which context the method attends everything. A server turns spare device memory into more frames."""
    if plan.context <= exact_tokens:
        return f"{row.name}: exact, as no sequence is longer than {exact_tokens:,} tokens"
    limit = f"{'at least ' if plan.device_limit else ''}{exact_tokens:,} tokens of context"
    return f"{row.name}: exact up to {limit}; beyond that decoding leaves pages out"


def _emulation(plan: Plan, seconds: float) -> str:
    """Tell what the other dtype costs on a CPU that emulates half precision."""
    if plan.model.dtype == "float32":
        slower = duration(BF16_EMULATION * seconds)
        return (
            "float32 is planned: this CPU emulates bfloat16, in which a prompt takes "
            f"{slower}. --dtype bfloat16 halves the memory of weights and KV cache"
        )
    return (
        f"this CPU emulates {plan.model.dtype}: in float32 a prompt takes {duration(seconds / BF16_EMULATION)}. "
        "hybrid serve chooses float32 where its weights, twice as large, take at most a third of the memory; "
        "--dtype float32 plans for it"
    )


def _notes(plan: Plan) -> list[str]:
    notes = [f"{row.name}: {row.refused}" for row in plan.rows if row.refused]
    short: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.why_not:
            short.setdefault(row.why_not, []).append(row.name)
    times = "" if plan.batch == 1 else f" {plan.batch:,} times"
    notes += [f"{', '.join(names)}: does not fit{times}: {why}" for why, names in short.items()]
    notes += [f"{row.name}: {row.otherwise}" for row in plan.rows if row.otherwise and row is answer(plan)]
    if (chosen := answer(plan)) is not None and chosen.exact_tokens:
        notes.append(_exactness(plan, chosen, chosen.exact_tokens))
    if plan.prompt_s is not None and plan.emulates_bf16:
        notes.append(_emulation(plan, plan.prompt_s))
    longest = plan.model.max_context
    if longest is not None and plan.context > longest:
        notes.append(
            f"{plan.model.name} was made for {longest:,} tokens; {plan.context:,} are planned. vLLM refuses them "
            "unless --hf-overrides gives the model a larger max_position_embeddings and the rope scaling of its card"
        )
    if plan.model.weights_are_counted:
        notes.append(
            f"{plan.model.name}: the weights are quantised and not here, so they are counted as {plan.model.dtype}; "
            "name a directory that has them"
        )
    return notes
