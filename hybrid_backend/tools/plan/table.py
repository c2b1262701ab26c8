"""The plan as a person reads it, in 80 columns: the answer first, then a row for each method, and on request what every
method takes of memory and of time."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybrid_backend.tools.plan.answer import answer, bound, headline, meaning, ratio_text, times_stock
from hybrid_backend.tools.plan.report import Plan, Row, serve_flags

_MARK = {"exact": "", "at most": "<= ", "estimate": "~ "}
_MEMORY_COLUMNS = ("fits", "device\nGiB", "host\nGiB", "largest\nbatch", "longest\ncontext")
_SPEED_COLUMNS = ("ms per\ntoken", "tokens\nper s", "best\nper s", "times\nstock")
COLUMNS = (*_MEMORY_COLUMNS, *_SPEED_COLUMNS)


def render(plan: Plan, before: Plan | None = None, serve: Sequence[str] = (), details: bool = False) -> RenderableType:
    """The answer, what bounds it, and the methods.

    Args:
        before: the plan without what `--what-if` changed.
        serve: what of the user's command line `hybrid serve` needs too: the model, the configuration.
        details: each method's memory, item by item, and its step, part by part.
    """
    chosen = answer(plan)
    parts: list[RenderableType] = [Text(headline(plan), style="bold")]
    if chosen is not None:
        if meant := meaning(plan, chosen):
            parts.append(Text(meant))
        parts += [Text(bound(plan, chosen)), Text(_places(chosen, "device") or _places(chosen, "host"))]
    parts += [Text(_load(plan), style="dim"), Text(), _methods(plan, before), Text()]
    if details:
        parts += [line for row in plan.rows if not row.refused for line in _details(row)]
    parts += [Text(f"- {note}") for note in _notes(plan)]
    served = next((row for row in plan.rows if row.fits and row.name == plan.configured), None)
    if served is not None:
        command = ["hybrid", "serve", *(serve or [plan.model.name]), *serve_flags(served, plan)]
        parts.append(_Command(command))
    return Group(*parts)


def show(plan: Plan, before: Plan | None, serve: Sequence[str], console: Console, details: bool = False) -> None:
    console.print(render(plan, before, serve, details), crop=False)  # a path may be longer than a line


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count / 2**10:.4g} KiB"


class _Command:
    """A command line that can be copied: broken with backslashes where the console is narrower."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def __rich_console__(self, console: Console, _: object) -> Iterator[Text]:
        lines = [""]
        for word in map(shlex.quote, self.words):
            longer = f"{lines[-1]} {word}".lstrip() if len(lines) == 1 else f"{lines[-1]} {word}"
            if lines[-1].strip() and len(longer) > console.width - 2:
                lines[-1] += " \\"
                longer = f"    {word}"
                lines.append("")
            lines[-1] = longer
        yield Text("\n".join(lines), style="dim", no_wrap=True, overflow="ignore")


def _load(plan: Plan) -> str:
    on = f" on {plan.machine}" if plan.machine else ""
    many = f" ({plan.devices} devices, memory is of one)" if plan.devices > 1 else ""
    device = f"device {size(plan.device_limit)}, " if plan.device_limit else "no device memory, "
    return (
        f"{plan.model.name}{on}{many}: {plan.batch} x {plan.context:,} tokens, {plan.model.dtype}; "
        f"{device}host {size(plan.host_limit)}"
    )


def _places(row: Row, place: str) -> str:
    """One place's memory, largest item first."""
    items = sorted((item for item in row.items if item.place == place), key=lambda item: -item.bytes)
    listed = ", ".join(f"{item.name} {_MARK[item.kind]}{size(item.bytes)}" for item in items)
    return f"{row.name}, {place} memory: {listed}" if items else ""


def _methods(plan: Plan, before: Plan | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("\nmethod", no_wrap=True)
    for name in COLUMNS if plan.has_times else _MEMORY_COLUMNS:
        table.add_column(name if "\n" in name else f"\n{name}", justify="right", no_wrap=True)
    for row in plan.rows:
        cells = ["refused"] if row.refused else _cells(plan, row)
        was = cells if before is None or row.refused else _cells(before, before.row(row.name))
        table.add_row(row.name, *cells)
        if was != cells:
            table.add_row("  was", *was, style="dim")
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
    """In at most seven characters."""
    if value is None:
        return "-"
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if value >= 1e2 * factor:
            return f"{value / factor:,.0f}{unit}"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3g}"


def _gib(size: float) -> str:
    """In at most five characters."""
    return _number(size / 2**30) if size < 1e4 * 2**30 else f"{size / 2**30 / 1e3:,.3g}k"


def _details(row: Row) -> Iterator[Text]:
    yield Text(f"{row.name}: {row.pages:,} KV pages", style="bold")
    for place in ("device", "host"):
        if text := _places(row, place):
            yield Text(text)
    if row.parts_ms:
        parts = ", ".join(f"{part} {ms:.3g}" for part, ms in row.parts_ms.items() if ms)
        which = "a step" if row.fits else f"a step of {row.max_batch}"
        yield Text(f"{row.name}, {which}, ms: {parts}")


def _notes(plan: Plan) -> list[str]:
    notes = [f"{row.name}: {row.refused}" for row in plan.rows if row.refused]
    short: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.why_not:
            short.setdefault(row.why_not, []).append(row.name)
    times = "" if plan.batch == 1 else f" {plan.batch:,} times"
    notes += [f"{', '.join(names)}: does not fit{times}: {why}" for why, names in short.items()]
    notes += [f"{row.name}: {row.otherwise}" for row in plan.rows if row.otherwise and row is answer(plan)]
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
