"""What replays say, as a table and as JSON."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from hybrid_backend import __version__
from hybrid_backend.tools.bench.agents import Traffic
from hybrid_backend.tools.bench.client import Answer, Replay
from hybrid_backend.tools.bench.limits import told


def good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether a turn was answered within the limits: milliseconds by ttft, tpot."""
    return not answer.error and all(getattr(answer, name) * 1e3 <= limit for name, limit in limits.items())


def rows(replays: Sequence[Replay], limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """One per endpoint: medians over its repeats, in the order in which endpoints were given."""
    found = []
    for name in dict.fromkeys(run.endpoint for run in replays):
        mine = [run for run in replays if run.endpoint == name]
        answers = [answer for run in mine for answer in run.answers]
        done = [answer for answer in answers if not answer.error]
        told = [answer for answer in done if answer.cached_tokens is not None]
        later = [answer.ttft for answer in done if answer.turn]
        found.append(
            {
                "endpoint": name,
                "turns": len(done),
                "failed": len(answers) - len(done),
                "answer_tokens_per_second": _median(mine, lambda run: sum(a.answer_tokens for a in run.answers)),
                "good_turns_per_second": _median(mine, lambda run: sum(good(a, limits) for a in run.answers)),
                "first_ttft_median": _middle([a.ttft for a in done if not a.turn]),
                "ttft_median": _middle(later),
                "ttft_p90": _ninth(later),
                "tpot_median": _middle([a.tpot for a in done]),
                "tpot_p90": _ninth([a.tpot for a in done]),
                "prompt_tokens_most": max((a.prompt_tokens for a in done), default=0),
                "cached": sum(a.cached_tokens or 0 for a in told) / max(1, sum(a.prompt_tokens for a in told))
                if told
                else None,
            }
        )
    return found


def _median(runs: Sequence[Replay], of: Callable[[Replay], float]) -> float:
    """Per second, over runs."""
    return statistics.median(of(run) / run.seconds for run in runs)


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ninth(values: Sequence[float]) -> float | None:
    """The 90th percentile, of whole measurements."""
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else None


def table(replays: Sequence[Replay], traffic: Traffic, limits: Mapping[str, float]) -> Table:
    found = rows(replays, limits)
    repeats = len({run.repeat for run in replays})
    shown = Table(
        title=f"{traffic.agents} agents, {traffic.turns} turns of {traffic.answer} tokens, {repeats} runs; "
        f"good: {told(limits)}",
        title_justify="left",
    )
    shown.add_column("")
    for row in found:
        shown.add_column(row["endpoint"], justify="right")
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("answer tokens/s", lambda row: f"{row['answer_tokens_per_second']:.1f}"),
        ("  times the first", lambda row: _times(row, found[0])),
        ("good turns/s", lambda row: f"{row['good_turns_per_second']:.3f}"),
        ("first turn: TTFT, median, s", lambda row: _seconds(row["first_ttft_median"])),
        ("later turns: TTFT, median, s", lambda row: _seconds(row["ttft_median"])),
        ("later turns: TTFT, 90 %, s", lambda row: _seconds(row["ttft_p90"])),
        ("TPOT, median, ms", lambda row: _milliseconds(row["tpot_median"])),
        ("TPOT, 90 %, ms", lambda row: _milliseconds(row["tpot_p90"])),
        ("longest prompt, tokens", lambda row: f"{row['prompt_tokens_most']:,}"),
        ("prompt tokens from the prefix cache", lambda row: "?" if row["cached"] is None else f"{row['cached']:.0%}"),
        ("turns answered", lambda row: str(row["turns"])),
        ("turns failed", lambda row: str(row["failed"])),
    ]
    for title, cell in lines:
        shown.add_row(title, *(cell(row) for row in found))
    return shown


def first_error(replays: Sequence[Replay]) -> str | None:
    return next((f"{run.endpoint}: {a.error}" for run in replays for a in run.answers if a.error), None)


def as_json(replays: Sequence[Replay], traffic: Traffic, limits: Mapping[str, float]) -> dict[str, Any]:
    return {
        "version": __version__,
        "machine": platform.platform(),
        "traffic": traffic.model_dump(),
        "good": dict(limits),
        "endpoints": rows(replays, limits),
        "runs": [run.model_dump() for run in replays],
    }


def _times(row: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    rate = first["answer_tokens_per_second"]
    return f"{row['answer_tokens_per_second'] / rate:.2f}" if rate else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f}"
