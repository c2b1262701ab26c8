"""The plan as a person reads it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybrid_backend.tools.plan.report import Plan, Row, serve_flags

_MARK = {"exact": "", "at most": "<= ", "estimate": "~ "}


def render(plan: Plan, before: Plan | None = None, serve: Sequence[str] = ()) -> RenderableType:
    """Tables of capacity and of memory.

    Args:
        before: the plan without what `--what-if` changed.
        serve: what of the user's command line `hybrid serve` needs too: the model, the configuration.
    """
    parts: list[RenderableType] = [Text(_headline(plan), style="bold"), _capacity(plan, before), _memory(plan)]
    notes = [f"{row.name}: {row.refused}" for row in plan.rows if row.refused]
    notes += [f"{row.name} does not fit: {row.why_not}" for row in plan.rows if row.why_not]
    longest = plan.model.max_context
    if longest is not None and plan.context > longest:
        notes.append(f"{plan.model.name} was made for {longest:,} tokens; {plan.context:,} are planned")
    if plan.machine is None:
        notes.append("no times: name a machine with --machine")
    parts += [Text(f"- {note}") for note in notes]
    chosen = next((row for row in plan.rows if row.fits and row.name == plan.configured), None)
    if chosen is not None:
        command = ["hybrid", "serve", *(serve or [plan.model.name]), *serve_flags(chosen, plan)]
        parts.append(Text(shlex.join(command), style="dim"))
    return Group(*parts)


def show(plan: Plan, before: Plan | None, serve: Sequence[str], console: Console) -> None:
    console.print(render(plan, before, serve), soft_wrap=True)


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count / 2**10:.4g} KiB"


def _headline(plan: Plan) -> str:
    on = f" on {plan.machine}" if plan.machine else ""
    many = f" ({plan.devices} devices, memory is of one)" if plan.devices > 1 else ""
    device = f"device {size(plan.device_limit)}, " if plan.device_limit else "no device memory, "
    return (
        f"{plan.model.name}{on}{many}: {plan.batch} x {plan.context:,} tokens, {plan.model.dtype}; "
        f"{device}host {size(plan.host_limit)}"
    )


def _capacity(plan: Plan, before: Plan | None) -> Table:
    table = Table()
    table.add_column("method")
    columns = ("fits", "device", "host", "max batch", "max context", "ms/token", "tokens/s", "tokens/s at max batch")
    for name in columns:
        table.add_column(name, justify="right")
    for row in plan.rows:
        old = before.row(row.name) if before else None
        if row.refused:
            table.add_row(row.name, "refused")
            continue
        table.add_row(
            row.name,
            "yes" if row.fits else "no",
            size(row.device_bytes),
            size(row.host_bytes),
            _change(row.max_batch, old.max_batch if old else None),
            _change(row.max_context, old.max_context if old else None),
            _change(row.step_ms, old.step_ms if old else None),
            _change(row.tokens_per_s, old.tokens_per_s if old else None),
            _change(row.best_tokens_per_s, old.best_tokens_per_s if old else None),
        )
    return table


def _change(now: float | None, before: float | None) -> str:
    if now is None:
        return "-"
    text = _number(now)
    return text if before is None else f"{text} (was {_number(before)})"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _memory(plan: Plan) -> Table:
    """Rows: pieces of memory; columns: methods."""
    rows = [row for row in plan.rows if not row.refused]
    table = Table()
    table.add_column("memory")
    for row in rows:
        table.add_column(row.name, justify="right")
    names = dict.fromkeys((item.place, item.name) for row in rows for item in row.items)
    for place, name in sorted(names, key=lambda key: key[0] == "host"):
        table.add_row(f"{place}: {name}", *(_cell(row, place, name) for row in rows))
    table.add_row("KV pages", *(f"{row.pages:,}" for row in rows))
    return table


def _cell(row: Row, place: str, name: str) -> str:
    found = next((item for item in row.items if (item.place, item.name) == (place, name)), None)
    return "" if found is None else f"{_MARK[found.kind]}{size(found.bytes)}"
