"""The table of a session, made from its journal alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_session.journal import FAILED, Case, Journal

HIDDEN = ("kernels", "endpoint", "rate", "repeat", "slowest_seconds")
"""Figures of the journal that the table leaves out."""
REHEARSED = "**A rehearsal on a simulated GPU: these figures are no measurements.**"
RANDOM = "Decoding has random weights and random keys."
TUNED = (
    "Where `page_spread` is above 0, keys are scaled page by page. The default of 0.03 was chosen so that 90 % of what "
    "a layer selects stays on the GPU: these figures rest on a tuned input."
)


def write(path: Path, journal: Journal, cases: Sequence[Case]) -> str:
    """Write the table of ``cases`` as Markdown and return it."""
    text = "\n".join(lines(list(journal.lines()), cases)) + "\n"
    temporary = path.with_suffix(".part")
    temporary.write_text(text)
    temporary.replace(path)  # A reader sees the table before or after, never half of it.
    return text


def lines(journal: Sequence[Mapping[str, Any]], cases: Sequence[Case]) -> Iterator[str]:
    sessions = [line for line in journal if line["event"] == "session"]
    machine = sessions[-1]["machine"] if sessions else {}
    yield "# GPU session"
    yield ""
    yield "; ".join(f"{name}: {value}" for name, value in machine.items())
    yield ""
    if sessions and sessions[-1]["rehearsal"]:
        yield REHEARSED
        yield ""
    if any(line["event"] == "result" and line["figures"].get("page_spread") for line in journal):
        yield f"{RANDOM} {TUNED}"
        yield ""
    yield "| case | status | seconds | figures |"
    yield "| --- | --- | --- | --- |"
    for case in cases:
        yield from rows(case, [line for line in journal if case.identity.items() <= line.items()])


def rows(case: Case, journal: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of one case: how its last try ended, then the figures of its last try."""
    begins = [index for index, line in enumerate(journal) if line["event"] == "begin"]
    last = journal[begins[-1] :] if begins else []
    end = next((line for line in last if line["event"] == "end"), None)
    if end is None:
        yield f"| {case.name} | {'not ended' if last else 'not begun'} | | |"
    else:
        reason = end["log"][-1].replace("|", "/") if end["status"] == FAILED and end["log"] else ""
        yield f"| {case.name} | {end['status']} | {end['seconds']:.0f} | {reason} |"
    for line in last:
        if line["event"] == "result":
            yield f"| | | | {', '.join(map(figure, visible(line['figures'])))} |"


def visible(figures: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in figures.items() if name not in HIDDEN and value is not None]


def figure(item: tuple[str, Any]) -> str:
    name, value = item
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
