"""The run: dense answers from the stock engine, then every method at every budget on the same prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from hybrid_backend.config import find_config, load_config
from hybrid_backend.tools.bench.accuracy.client import Scored, ask, fidelity
from hybrid_backend.tools.bench.accuracy.fidelity import FIDELITY_FLAGS
from hybrid_backend.tools.bench.accuracy.mass import MassMeter
from hybrid_backend.tools.bench.accuracy.scoring import score
from hybrid_backend.tools.bench.accuracy.store import DenseAnswers, Key, Result, Results, same_settings
from hybrid_backend.tools.bench.accuracy.task import ModelTokenizer, Task
from hybrid_backend.tools.bench.accuracy.tasks import GENERATORS
from hybrid_backend.tools.bench.servers import Server, hybrid_server, stock_server

STOCK = "stock"
WHOLE = ("dense", "headinfer")  # they attend everything: a budget means nothing to them


@dataclass(frozen=True)
class Plan:
    """What to run. ``question``: ``prompt``, as usual, or ``decode``: forced token by token after the context, so that
    not the (always exact) prompt but decoding has to find the answer."""

    model: str
    directory: str
    methods: Sequence[str]
    budgets: Sequence[int]
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    question: str = "prompt"
    external: Sequence[Task] = ()  # LongBench
    external_length: int = 0
    dtype: str = "bfloat16"
    pool: int = 2**30  # bytes
    fidelity_tokens: int = 64
    overrides: dict[str, Any] = field(default_factory=dict)
    deadline: float = float("inf")  # of time.monotonic

    def runs(self) -> list[tuple[str, int]]:
        """(method, budget) of each server."""
        found: list[tuple[str, int]] = []
        for method in self.methods:
            found += [(method, 0)] if method in WHOLE else [(method, budget) for budget in self.budgets]
        return found


@dataclass(frozen=True)
class Case:
    task: Task
    length: int
    sample: int
    ids: tuple[int, ...]
    split: int  # ids[split:] is the question

    @property
    def digest(self) -> str:
        return sha256(json.dumps([self.ids, self.task.answers, self.task.max_tokens]).encode()).hexdigest()[:16]


class OutOfTime(Exception):
    """The plan's deadline has passed."""


def cases(plan: Plan, tokenizer: ModelTokenizer) -> Iterator[Case]:
    """Sample by sample, so that a run that is stopped has seen all tasks equally often."""
    for sample in range(plan.samples):
        for length in plan.lengths:
            for name in plan.tasks:
                yield _case(GENERATORS[name](sample, length, tokenizer), length, sample, tokenizer)
    numbered: dict[str, int] = {}
    for task in plan.external:
        numbered[task.name] = numbered.get(task.name, -1) + 1
        yield _case(task, plan.external_length, numbered[task.name], tokenizer)


def _case(task: Task, length: int, sample: int, tokenizer: ModelTokenizer) -> Case:
    ids, before = tokenizer.ids(task.prompt), tokenizer.ids(task.prompt[: task.question_at])
    split = next((i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), len(before))
    return Case(task, length, sample, tuple(ids), split)


class Driver:
    """Runs a plan; what is known already is not asked again."""

    def __init__(self, plan: Plan, out: Path, console: Console) -> None:
        same_settings(out, {"dtype": plan.dtype, "overrides": plan.overrides, "fidelity tokens": plan.fidelity_tokens})
        self.plan, self.out, self.console = plan, out, console
        self.results, self.dense = Results(out / "results.jsonl"), DenseAnswers(out / "dense")
        self.tokenizer = ModelTokenizer(plan.directory)
        self.cases = list(cases(plan, self.tokenizer))
        config = find_config(plan.model)
        self.page, self.exact = load_config(config).page_size, set(load_config(config).exact_layers)
        self.done, self.asked, self.started = 0, 0, time.monotonic()

    def keys(self, method: str, budget: int) -> list[tuple[Key, Case]]:
        """What a method is asked. Prompts within its budget are left out: there it is exact by promise."""
        plan = self.plan
        question = "prompt" if method == STOCK else plan.question
        return [
            (Key(plan.model, method, budget, c.task.name, c.length, c.sample, question, c.digest), c)
            for c in self.cases
            if not budget or len(c.ids) > budget
        ]

    def run(self) -> bool:
        """Whether everything is done; False if time was up before."""
        missing = {(STOCK, 0): [(k, c) for k, c in self.keys(STOCK, 0) if k not in self.results or k not in self.dense]}
        for run in self.plan.runs():
            missing[run] = [(k, c) for k, c in self.keys(*run) if k not in self.results]
        self.asked = sum(map(len, missing.values()))
        self.console.print(f"{len(self.cases)} prompts, {len(missing) - 1} runs, {self.asked} answers to get")
        try:
            for (method, budget), wanted in missing.items():
                if wanted:
                    self._run(method, budget, wanted)
        except OutOfTime:
            self.console.print("time is up; the same command goes on from here")
            return False
        return True

    def _run(self, method: str, budget: int, wanted: list[tuple[Key, Case]]) -> None:
        self._check_time()
        with self._server(method, budget) as server:
            meter = MassMeter(server, self.exact) if method not in (STOCK, *WHOLE) else None
            for key, case in wanted:
                self._check_time()
                began = time.monotonic()
                result = self._dense(server, key, case) if method == STOCK else self._sparse(server, key, case, meter)
                self.results.add(replace(result, seconds=round(time.monotonic() - began, 2)))
                self._tell(result)

    def _check_time(self) -> None:
        if time.monotonic() > self.plan.deadline:
            raise OutOfTime

    def _dense(self, server: Server, key: Key, case: Case) -> Result:
        answer = ask(server, case.ids, case.task.max_tokens)
        self.dense.put(key, replace(answer, logprobs=answer.logprobs[: self.plan.fidelity_tokens]))
        text = self.tokenizer.text(answer.tokens)
        return Result(key, score(case.task, text), text)

    def _sparse(self, server: Server, key: Key, case: Case, meter: MassMeter | None) -> Result:
        dense = self.dense.get(key)
        decoded = self.plan.question == "decode"
        prompt, question = (case.ids[: case.split], case.ids[case.split :]) if decoded else (case.ids, ())
        skip = len(question)
        answer = ask(server, prompt, case.task.max_tokens, begin=question, ends=self.tokenizer.ends)
        steps = len(answer.tokens) - 1
        mine, followed = answer.tokens[skip:], answer.logprobs[skip:]
        wanted = len(dense.logprobs)
        if mine[: wanted - 1] != dense.tokens[: wanted - 1]:  # it left the dense path: follow that to compare
            again = ask(server, prompt, 0, begin=[*question, *dense.tokens[:wanted]])
            followed, steps = again.logprobs[skip:], steps + len(again.tokens) - 1
        near = fidelity(dense.logprobs, followed[:wanted], first=0 if decoded else 1)
        text = self.tokenizer.text(mine)
        mass = meter.since_last(steps) if meter is not None else None
        return Result(key, score(case.task, text), text, near.kl, near.agreement, near.positions, mass)

    def _server(self, method: str, budget: int) -> AbstractContextManager[Server]:
        plan, logs = self.plan, self.out / "logs"
        flags = ["--dtype", plan.dtype, "--max-num-seqs", "2", "--enforce-eager", *FIDELITY_FLAGS]
        if method == STOCK:
            pool = str(plan.pool)
            return stock_server(logs, plan.directory, [*flags, "--kv-cache-memory-bytes", pool], plan.model)
        keys: dict[str, Any] = {
            "method": method,
            "tiers": "separate",
            "host_pool.size": plan.pool,
            "metrics.sample_interval": 1,
            "staging_tokens": 64 * self.page,
            **({"budget_tokens": budget, "hgca.window_tokens": budget} if budget else {}),
            **plan.overrides,
        }
        return hybrid_server(logs, keys, flags, model=plan.model)

    def _tell(self, result: Result) -> None:
        self.done += 1
        key, spent = result.key, time.monotonic() - self.started
        left = (self.asked - self.done) * spent / self.done / 60
        kl = "" if result.kl is None else f"  KL {result.kl:.4f}  same {result.agreement:.2f}"
        mass = "" if result.mass is None else f"  mass {result.mass:.3f}"
        self.console.print(
            f"[{self.done}/{self.asked}] {name_of(key.method, key.budget)} {key.task}@{key.length}#{key.sample} "
            f"score {result.score:.2f}{kl}{mass}  ({left:.0f} min left)",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def name_of(method: str, budget: int) -> str:
    return f"{method}@{budget}" if budget else method


def run_endpoint(plan: Plan, endpoint: Scored, out: Path, console: Console) -> bool:
    """Scores only, of a server that is not ours."""
    tokenizer, results = ModelTokenizer(plan.directory), Results(out / "results.jsonl")
    todo = [
        (Key(plan.model, endpoint.url, 0, c.task.name, c.length, c.sample, "prompt", c.digest), c)
        for c in cases(plan, tokenizer)
    ]
    todo = [(key, case) for key, case in todo if key not in results]
    for number, (key, case) in enumerate(todo, 1):
        if time.monotonic() > plan.deadline:
            console.print("time is up; the same command goes on from here")
            return False
        began, text = time.monotonic(), endpoint.ask(case.task)
        results.add(Result(key, score(case.task, text), text, seconds=round(time.monotonic() - began, 2)))
        console.print(f"[{number}/{len(todo)}] {key.task}@{key.length}#{key.sample} done", markup=False)
    return True
