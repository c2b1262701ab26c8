"""From results to tables: every task and every method with its interval, and where the dense model fails, said so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hybrid_backend.tools.bench.accuracy.run import STOCK, name_of
from hybrid_backend.tools.bench.accuracy.statistics import Estimate, bootstrap, wilson
from hybrid_backend.tools.bench.accuracy.store import Result

FAILS = 0.2  # below this score the dense model itself fails a task


@dataclass(frozen=True)
class Line:
    """One method at one budget on one task at one length; ``dense`` is of the same samples. ``method`` is `STOCK`'s for
    dense itself."""

    task: str
    length: int
    method: str
    budget: float
    score: Estimate
    dense: Estimate | None
    kl: Estimate | None
    agreement: Estimate | None
    mass: Estimate | None

    @property
    def dense_fails(self) -> bool:
        return self.dense is not None and self.dense.mean < FAILS


@dataclass(frozen=True)
class Summary:
    """One method at one budget and length. ``can``: only over tasks that dense can do (`FAILS`); differences to
    dense are paired, sample by sample."""

    method: str
    budget: float
    length: int
    tasks_can: int
    can: Estimate | None
    dense_can: Estimate | None
    difference_can: Estimate | None
    tasks_all: int
    all: Estimate
    difference_all: Estimate | None
    kl: Estimate | None
    agreement: Estimate | None
    mass: Estimate | None


def lines(results: Sequence[Result]) -> list[Line]:
    """In the order in which tasks and methods first appear, lengths ascending."""
    dense = {_sample(r): r.score for r in results if r.key.method == STOCK}
    groups: dict[tuple[str, int, str, float], list[Result]] = {}
    for r in results:
        groups.setdefault((r.key.task, r.key.length, r.key.method, r.key.budget), []).append(r)
    found = []
    for (task, length, method, budget), group in groups.items():
        theirs = [dense[_sample(r)] for r in group if _sample(r) in dense]
        found.append(
            Line(
                task, length, method, budget,
                score=wilson([r.score for r in group]),
                dense=wilson(theirs) if len(theirs) == len(group) else None,
                kl=_mean(group, lambda r: r.kl),
                agreement=_mean(group, lambda r: r.agreement),
                mass=_mean(group, lambda r: r.mass),
            )
        )  # fmt: skip
    return found


def summaries(results: Sequence[Result]) -> list[Summary]:
    """Of every method but dense itself."""
    dense = {_sample(r): r.score for r in results if r.key.method == STOCK}
    whole = {(line.task, line.length): line.score.mean for line in lines(results) if line.method == STOCK}
    groups: dict[tuple[str, float, int], list[Result]] = {}
    for r in results:
        if r.key.method != STOCK:
            groups.setdefault((r.key.method, r.key.budget, r.key.length), []).append(r)
    found = []
    for (method, budget, length), group in groups.items():
        can = [r for r in group if whole.get((r.key.task, length), 0.0) >= FAILS]
        found.append(
            Summary(
                method, budget, length,
                tasks_can=len({r.key.task for r in can}),
                can=wilson([r.score for r in can]) if can else None,
                dense_can=wilson([dense[_sample(r)] for r in can]) if can else None,
                difference_can=bootstrap([r.score - dense[_sample(r)] for r in can]) if can else None,
                tasks_all=len({r.key.task for r in group}),
                all=wilson([r.score for r in group]),
                difference_all=_mean(group, lambda r: r.score - dense[_sample(r)] if _sample(r) in dense else None),
                kl=_mean(group, lambda r: r.kl),
                agreement=_mean(group, lambda r: r.agreement),
                mass=_mean(group, lambda r: r.mass),
            )
        )  # fmt: skip
    return found


def _sample(result: Result) -> tuple[str, str, str]:
    return result.key.model, result.key.task, result.key.prompt


def _mean(group: Iterable[Result], value: Callable[[Result], float | None]) -> Estimate | None:
    values = [v for v in map(value, group) if v is not None]
    return bootstrap(values) if values else None


def markdown(results: Sequence[Result], title: str) -> str:
    """The whole report."""
    rows, sums = lines(results), summaries(results)
    parts = [f"# Accuracy: {title}", _LEGEND, *_summary_table(sums)]
    for length in sorted({row.length for row in rows}):
        parts += _task_tables([row for row in rows if row.length == length], length)
    return "\n".join(parts) + "\n"


_LEGEND = f"""
Mean [95 % interval]. Scores are between 0 and 1, with Wilson's interval (too wide rather than too narrow for scores
between 0 and 1); differences, KL, agreement and mass with the percentile bootstrap over samples. "Can": over the tasks
that the dense model answers with at least {FAILS}; choosing them by its own samples flatters dense a little. KL is
KL(dense || method) in nats per decoded token along the dense answer, agreement the share of equal most likely tokens,
mass the attention mass on what sparse layers attend.
"""


def _summary_table(sums: Sequence[Summary]) -> list[str]:
    if not sums:
        return []
    head = ("method", "length", "tasks dense can do", "their score", "dense", "difference", "difference, all tasks")
    table = [_row(*head, "agreement", "KL", "mass"), _row(*["---"] * 10)]
    for s in sorted(sums, key=lambda s: s.length):
        table.append(
            _row(
                f"`{name_of(s.method, s.budget)}`", s.length, f"{s.tasks_can} of {s.tasks_all}", _show(s.can),
                _show(s.dense_can), _show(s.difference_can, sign=True), _show(s.difference_all, sign=True),
                _show(s.agreement), _show(s.kl, digits=4), _show(s.mass, digits=3),
            )
        )  # fmt: skip
    return ["## Methods\n", *table, ""]


def _task_tables(rows: Sequence[Line], length: int) -> list[str]:
    methods = list(dict.fromkeys((r.method, r.budget) for r in rows if r.method != STOCK))
    by = {(r.task, r.method, r.budget): r for r in rows}
    tasks = list(dict.fromkeys(r.task for r in rows))
    names = [f"`{name_of(*m)}`" for m in methods]
    scores = [_row("task", "n", "dense", *names), _row(*["---"] * (3 + len(methods)))]
    near = [_row("task", *names), _row(*["---"] * (1 + len(methods)))]
    for task in tasks:
        dense = by.get((task, STOCK, 0))
        fails = dense is not None and dense.score.mean < FAILS
        label = f"{task} (dense fails)" if fails else task
        mine = [by.get((task, *m)) for m in methods]
        n = max(r.score.n for r in rows if r.task == task)
        scores.append(
            _row(label, n, _show(dense.score if dense else None), *(_show(m.score if m else None) for m in mine))
        )
        near.append(_row(task, *(_fidelity(m) for m in mine)))
    parts = [f"## Scores at {length} tokens\n", *scores, ""]
    if any(r.kl for r in rows):
        parts += [f"## Fidelity at {length} tokens: agreement / KL / mass\n", *near, ""]
    return parts


def _fidelity(line: Line | None) -> str:
    if line is None or line.kl is None or line.agreement is None:
        return ""
    mass = f"{line.mass.mean:.3f}" if line.mass else "-"  # no layer was sparse, or none was sampled
    return f"{line.agreement.mean:.2f} / {line.kl.mean:.4f} / {mass}"


def _show(value: Estimate | None, digits: int = 2, sign: bool = False) -> str:
    if value is None:
        return ""
    form = f"{'+' if sign else ''}.{digits}f"
    return f"{value.mean:{form}} [{value.low:{form}}, {value.high:{form}}]"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def as_json(results: Sequence[Result], arguments: dict[str, object]) -> str:
    return json.dumps(
        {
            "arguments": arguments,
            "dense_fails_below": FAILS,
            "methods": [asdict(s) for s in summaries(results)],
            "tasks": [asdict(line) for line in lines(results)],
        },
        indent=1,
    )


def plot(results: Sequence[Result], file: Path) -> bool:
    """Score difference to dense and KL by budget, one line per method and length. False if there is nothing to draw."""
    sums = [s for s in summaries(results) if s.kl is not None]
    if not sums:
        return False
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    budgets = sorted({s.budget for s in sums if s.budget}) or [1]
    for number, (method, length) in enumerate(dict.fromkeys((s.method, s.length) for s in sums)):
        points = sorted((s for s in sums if (s.method, s.length) == (method, length)), key=lambda s: s.budget)
        if len(points) == 1 and not points[0].budget:
            points = points * len(budgets) if len(budgets) > 1 else points
        at = [p.budget or b for p, b in zip(points, budgets, strict=False)]
        style = {"label": f"{method}, {length} tokens", "marker": "o", "capsize": 3, "color": f"C{number % 10}"}
        for axis, values in ((left, [p.difference_can for p in points]), (right, [p.kl for p in points])):
            drawn = [(x * 1.02**number, v) for x, v in zip(at, values, strict=True) if v is not None]
            if drawn:
                means = [v.mean for _, v in drawn]
                errors = [[v.mean - v.low for _, v in drawn], [v.high - v.mean for _, v in drawn]]
                axis.errorbar([x for x, _ in drawn], means, yerr=errors, **style)
    left.axhline(0, color="grey", linewidth=0.8)
    left.set_ylabel("score minus dense, tasks that dense can do")
    right.set_ylabel("KL(dense || method), nats per token")
    right.set_yscale("symlog", linthresh=1e-3)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(b) for b in budgets])
        axis.set_xlabel("budget, tokens")
        axis.grid(alpha=0.3)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(file, dpi=120)
    return True
