"""The report: scores and fidelity of each method and of each task, with intervals, and the tasks that dense fails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid_backend.tools.bench.accuracy.run import run_name
from hybrid_backend.tools.bench.accuracy.statistics import Estimate, bootstrap, wilson
from hybrid_backend.tools.bench.accuracy.store import STOCK, Result
from hybrid_backend.tools.bench.report import draw_lines, markdown_table

FAILS = 0.2
"""Score below which the dense model itself fails a task."""
_LEGEND = f"""
Mean [95 % interval]. Scores are between 0 and 1, with Wilson's interval (too wide rather than too narrow for scores
between 0 and 1); differences, KL, agreement and mass with the percentile bootstrap over samples. "Can": over the tasks
that the dense model answers with at least {FAILS}; choosing them by its own samples flatters dense a little. KL is
KL(dense || method) in nats per decoded token along the dense answer, agreement the share of equal most likely tokens,
mass the attention mass on what sparse layers attend.

"""


@dataclass(frozen=True)
class Estimates:
    """Scores and fidelity over some samples, None where the samples lack them.

    ``dense`` is the dense score of the same samples, ``difference`` the score minus the dense one, paired by sample.
    """

    tasks: int
    score: Estimate | None
    dense: Estimate | None
    difference: Estimate | None
    kl: Estimate | None
    agreement: Estimate | None
    mass: Estimate | None


class Report:
    """Estimates from results, in the order in which tasks and methods first appear, lengths ascending.

    ``tasks`` has them by task, length, method and budget; the stock engine's are dense. ``methods`` has them by method,
    budget and length, first over the tasks that dense can do, then over all tasks.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        """Group the results."""
        dense = {_sample(result): result.score for result in results if result.key.method == STOCK}
        tasks: dict[tuple[str, int, str, float], list[Result]] = {}
        methods: dict[tuple[str, float, int], list[Result]] = {}
        for result in sorted(results, key=lambda result: result.key.length):
            key = result.key
            tasks.setdefault((key.task, key.length, key.method, key.budget), []).append(result)
            if key.method != STOCK:
                methods.setdefault((key.method, key.budget, key.length), []).append(result)
        self.tasks = {names: _estimates(group, dense) for names, group in tasks.items()}
        can = {names[:2] for names, task in self.tasks.items() if names[2] == STOCK and not _fails(task)}
        self.methods = {
            names: (
                _estimates([r for r in group if (r.key.task, r.key.length) in can], dense),
                _estimates(group, dense),
            )
            for names, group in methods.items()
        }

    def markdown(self, title: str) -> str:
        """Return the whole report as markdown."""
        text = f"# Accuracy: {title}\n{_LEGEND}"
        if self.methods:
            head = ["method", "length", "tasks dense can do", "their score", "dense", "difference"]
            rows = [
                [f"`{run_name(method, budget)}`", length, f"{can.tasks} of {all_tasks.tasks}", _cell(can.score),
                 _cell(can.dense), _cell(can.difference, "+.2f"), _cell(all_tasks.difference, "+.2f"),
                 _cell(all_tasks.agreement), _cell(all_tasks.kl, ".4f"), _cell(all_tasks.mass, ".3f")]
                for (method, budget, length), (can, all_tasks) in self.methods.items()
            ]  # fmt: skip
            text += "## Methods\n\n" + markdown_table([*head, "difference, all tasks", "agreement", "KL", "mass"], rows)
        for length in dict.fromkeys(names[1] for names in self.tasks):
            text += self._task_tables(length)
        return text

    def _task_tables(self, length: int) -> str:
        tasks = {
            (task, method, budget): estimates
            for (task, task_length, method, budget), estimates in self.tasks.items()
            if task_length == length
        }
        runs = list(dict.fromkeys((method, budget) for _, method, budget in tasks if method != STOCK))
        names = [f"`{run_name(method, budget)}`" for method, budget in runs]
        scores, fidelities = [], []
        for task in dict.fromkeys(key[0] for key in tasks):
            dense = tasks.get((task, STOCK, 0))
            columns = [tasks.get((task, *run)) for run in runs]
            label = f"{task} (dense fails)" if dense is not None and _fails(dense) else task
            n = max(estimates.score.n for key, estimates in tasks.items() if key[0] == task and estimates.score)
            scores.append([label, n, *(_cell(column.score if column else None) for column in (dense, *columns))])
            fidelities.append([task, *map(_fidelity_cell, columns)])
        text = f"## Scores at {length} tokens\n\n" + markdown_table(["task", "n", "dense", *names], scores)
        if any(estimates.kl for estimates in tasks.values()):
            text += f"## Fidelity at {length} tokens: agreement / KL / mass\n\n"
            text += markdown_table(["task", *names], fidelities)
        return text

    def json(self, arguments: dict[str, object]) -> str:
        """Return all estimates as JSON."""
        methods = [
            {
                "method": method, "budget": budget, "length": length, "tasks_can": can.tasks, "can": can.score,
                "dense_can": can.dense, "difference_can": can.difference, "tasks_all": all_tasks.tasks,
                "all": all_tasks.score, "difference_all": all_tasks.difference, "kl": all_tasks.kl,
                "agreement": all_tasks.agreement, "mass": all_tasks.mass,
            }
            for (method, budget, length), (can, all_tasks) in self.methods.items()
        ]  # fmt: skip
        tasks = [
            {"task": task, "length": length, "method": method, "budget": budget, **vars(estimates)}
            for (task, length, method, budget), estimates in self.tasks.items()
        ]
        record = {"arguments": arguments, "dense_fails_below": FAILS, "methods": methods, "tasks": tasks}
        return json.dumps(record, indent=1, default=vars)

    def plot(self, file: Path) -> bool:
        """Draw score difference to dense and KL by budget, a line per method and length; False without fidelity."""
        methods = {names: pair for names, pair in sorted(self.methods.items()) if pair[1].kl is not None}
        if not methods:
            return False
        # pyplot would need a display and keep the figure.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        budgets = sorted({budget for _, budget, _ in methods if budget}) or [1.0]
        for axis, is_kl in ((left, False), (right, True)):
            lines: dict[str, list[list[float]]] = {}
            for (method, budget, length), (can, all_tasks) in methods.items():
                estimate = all_tasks.kl if is_kl else can.difference
                if estimate is None:
                    continue
                # A method without budget is drawn as a level over all budgets.
                for x in [budget] if budget else budgets:
                    points = lines.setdefault(f"{method}, {length} tokens", [])
                    points.append([x, estimate.mean, estimate.low, estimate.high])
            arrays = {label: np.array(points) for label, points in lines.items()}
            draw_lines(axis, arrays, {budget: str(budget) for budget in budgets}, "budget, tokens")
        left.axhline(0, color="grey", linewidth=0.8)
        left.set_ylabel("score minus dense, tasks that dense can do")
        right.set_ylabel("KL(dense || method), nats per token")
        right.set_yscale("symlog", linthresh=1e-3)
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_xticks(budgets, [str(budget) for budget in budgets])
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
        figure.savefig(file, dpi=120)
        return True


def _sample(result: Result) -> tuple[str, str, str]:
    return result.key.model, result.key.task, result.key.prompt


def _estimates(results: Sequence[Result], dense_scores: Mapping[tuple[str, str, str], float]) -> Estimates:
    pairs = [(result.score, dense_scores[_sample(result)]) for result in results if _sample(result) in dense_scores]
    return Estimates(
        tasks=len({result.key.task for result in results}),
        score=wilson([result.score for result in results]),
        # With a sample missing, the mean would be over other samples than the score's.
        dense=wilson([dense for _, dense in pairs]) if len(pairs) == len(results) else None,
        difference=bootstrap([score - dense for score, dense in pairs]),
        kl=bootstrap([result.kl for result in results]),
        agreement=bootstrap([result.agreement for result in results]),
        mass=bootstrap([result.mass for result in results]),
    )


def _fails(dense: Estimates) -> bool:
    """Return whether the dense model itself fails a task."""
    return dense.score is not None and dense.score.mean < FAILS


def _cell(value: Estimate | None, form: str = ".2f") -> str:
    return "" if value is None else f"{value.mean:{form}} [{value.low:{form}}, {value.high:{form}}]"


def _fidelity_cell(estimates: Estimates | None) -> str:
    if estimates is None or estimates.kl is None or estimates.agreement is None:
        return ""
    mass = f"{estimates.mass.mean:.3f}" if estimates.mass is not None else "-"
    return f"{estimates.agreement.mean:.2f} / {estimates.kl.mean:.4f} / {mass}"
