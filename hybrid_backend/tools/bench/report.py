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
from hybrid_backend.tools.counts import counted


def good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether a turn was answered within the limits: milliseconds by ttft, tpot."""
    return not answer.error and all(getattr(answer, name) * 1e3 <= limit for name, limit in limits.items())


def rows(replays: Sequence[Replay], limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """One per endpoint, in the order in which endpoints were given: every figure's median over the runs, and in
    ``range`` its least and most."""
    found = []
    names = list(dict.fromkeys(run.endpoint for run in replays))
    for name in names:
        mine = [run for run in replays if run.endpoint == name]
        answers = [answer for run in mine for answer in run.answers]
        done = [answer for answer in answers if not answer.error]
        counted = [answer for answer in done if answer.cached_tokens is not None]
        figures = _figures(mine, limits)
        first = {run.repeat: _rate(run) for run in replays if run.endpoint == names[0]}
        figures["times_first"] = [_rate(run) / first[run.repeat] for run in mine if first.get(run.repeat)]
        found.append(
            {
                "endpoint": name,
                "turns": len(done),
                "failed": len(answers) - len(done),
                **{key: statistics.median(values) if values else None for key, values in figures.items()},
                "range": {key: [min(values), max(values)] for key, values in figures.items() if values},
                "prompt_tokens_most": max((a.prompt_tokens for a in done), default=0),
                "cached": sum(a.cached_tokens or 0 for a in counted) / max(1, sum(a.prompt_tokens for a in counted))
                if counted
                else None,
            }
        )
    return found


def _figures(runs: Sequence[Replay], limits: Mapping[str, float]) -> dict[str, list[float]]:
    """One value per run that has it."""
    found: dict[str, list[float]] = {}
    for run in runs:
        done = [answer for answer in run.answers if not answer.error]
        later, tpot = [answer.ttft for answer in done if answer.turn], [answer.tpot for answer in done]
        values = {
            "answer_tokens_per_second": _rate(run),
            "good_turns_per_second": sum(good(answer, limits) for answer in run.answers) / run.seconds,
            "first_ttft_median": _middle([answer.ttft for answer in done if not answer.turn]),
            "ttft_median": _middle(later),
            "ttft_p90": _ninth(later),
            "tpot_median": _middle(tpot),
            "tpot_p90": _ninth(tpot),
        }
        for key, value in values.items():
            found.setdefault(key, []).extend([] if value is None else [value])
    return found


def _rate(run: Replay) -> float:
    return sum(answer.answer_tokens for answer in run.answers) / run.seconds


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ninth(values: Sequence[float]) -> float | None:
    """The 90th percentile, of whole measurements."""
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else None


def table(replays: Sequence[Replay], traffic: Traffic, limits: Mapping[str, float]) -> Table:
    """Medians of the runs, least..most in brackets where there are several."""
    found = rows(replays, limits)
    repeats = len({run.repeat for run in replays})
    shown = Table(
        title=f"{counted(traffic.agents, 'agent')}, {counted(traffic.turns, 'turn')} of {traffic.answer} tokens, "
        f"{counted(repeats, 'run')}; "
        f"good: {told(limits)}",
        title_justify="left",
    )
    shown.add_column("")
    for row in found:
        shown.add_column(row["endpoint"], justify="right")
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("answer tokens/s", lambda row: _spread(row, "answer_tokens_per_second", 1)),
        ("  times the first", lambda row: _spread(row, "times_first", 2)),
        ("good turns/s", lambda row: _spread(row, "good_turns_per_second", 3)),
        ("first turn: TTFT, median, s", lambda row: _spread(row, "first_ttft_median", 2)),
        ("later turns: TTFT, median, s", lambda row: _spread(row, "ttft_median", 2)),
        ("later turns: TTFT, 90 %, s", lambda row: _spread(row, "ttft_p90", 2)),
        ("TPOT, median, ms", lambda row: _spread(row, "tpot_median", 1, 1e3)),
        ("TPOT, 90 %, ms", lambda row: _spread(row, "tpot_p90", 1, 1e3)),
        ("longest prompt, tokens", lambda row: f"{row['prompt_tokens_most']:,}"),
        ("prompt tokens from the prefix cache", lambda row: "?" if row["cached"] is None else f"{row['cached']:.0%}"),
        ("turns answered", lambda row: str(row["turns"])),
        ("turns failed", lambda row: str(row["failed"])),
    ]
    for title, cell in lines:
        shown.add_row(title, *(cell(row) for row in found))
    return shown


def _spread(row: Mapping[str, Any], key: str, digits: int, scale: float = 1.0) -> str:
    if row[key] is None:
        return "-"
    middle = f"{row[key] * scale:.{digits}f}"
    least, most = (f"{value * scale:.{digits}f}" for value in row["range"][key])
    return middle if least == most else f"{middle} ({least}..{most})"


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
