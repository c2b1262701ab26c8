"""The run: dense answers from the stock engine, then every method at every budget on the same prompts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench.accuracy.client import Scored, ask, fidelity
from hybrid_backend.tools.bench.accuracy.fidelity import FIDELITY_ENVIRONMENT, FIDELITY_FLAGS
from hybrid_backend.tools.bench.accuracy.mass import MassMeter
from hybrid_backend.tools.bench.accuracy.scoring import score
from hybrid_backend.tools.bench.accuracy.store import DenseAnswers, Key, Result, Results, same_settings
from hybrid_backend.tools.bench.accuracy.task import ModelTokenizer, Task
from hybrid_backend.tools.bench.accuracy.tasks import GENERATORS
from hybrid_backend.tools.bench.servers import Server, configured, hybrid_server, stock_server
from hybrid_backend.tools.counts import counted

STOCK = "stock"
WHOLE = ("dense", "headinfer")  # they attend everything: a budget means nothing to them
ASKED = ("scout", "infinigen")  # each request may have a budget of its own
EVERYTHING = 1 << 30
AT_ONCE = 4  # requests, where only one prompt is asked at once


@dataclass(frozen=True)
class Plan:
    """What to run. ``question``: ``prompt``, as usual, or ``decode``: forced token by token after the context, so that
    not the (always exact) prompt but decoding has to find the answer. ``budgets``: tokens, or a share of the prompt.
    ``in_place``: one server a method, whose requests ask for their budgets, so that a prompt is computed once; the
    first of them also gives the dense answers, everything attended, in the place of the stock engine. ``at_once``:
    prompts, for a GPU; the mass of single answers is sampled with one. ``flags``: of every server's engine."""

    model: str
    directory: str
    methods: Sequence[str]
    budgets: Sequence[float]
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    question: str = "prompt"
    external: Sequence[Task] = ()  # LongBench
    external_length: int = 0
    dtype: str = "bfloat16"
    pool: int = 2**30  # bytes
    fidelity_tokens: int = 64
    in_place: bool = False
    at_once: int = 1
    flags: Sequence[str] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    deadline: float = float("inf")  # of time.monotonic

    def servers(self) -> list[list[Run]]:
        """What each of them is asked; of more than one run its requests say which."""
        if self.in_place:
            servers = [[(method, budget) for budget in self.budgets] for method in self.methods]
            return [[(STOCK, 0), *servers[0]], *servers[1:]]
        found: list[list[Run]] = [[(STOCK, 0)]]
        for method in self.methods:
            found += [[(method, 0)]] if method in WHOLE else [[(method, budget)] for budget in self.budgets]
        return found

    @property
    def is_metered(self) -> bool:
        """Whether a server answers one request at a time, whose mass its means then tell."""
        return not self.in_place and self.at_once == 1

    @cached_property
    def config(self) -> HybridConfig:
        """Of all hybrid servers, but for what differs between runs."""
        return configured(self.model, {"budget_tokens": EVERYTHING, **self.overrides})

    def own(self, method: str, budget: float) -> dict[str, Any]:
        """Keys of a run's server that make the results what they are called."""
        if self.in_place:
            return {"method": method, "sparse": "always"}
        tokens = {"budget_tokens": int(budget), "hgca.window_tokens": int(budget)} if budget else {}
        metered = {"metrics.sample_interval": 1} if self.is_metered else {}
        return {"method": method, **metered, **tokens}

    def check(self) -> None:
        """To be asked before anything is started.

        Raises:
            ConfigError: a configuration that the servers would refuse, or in which results are not what they are
                called; a budget that no server can keep.
        """
        page, always = self.config.page_size, self.config.sinks + self.config.recent
        for key in self.own("", 1):
            section, _, name = key.rpartition(".")
            if key in self.overrides or name in self.overrides.get(section, {}):
                flag = {"method": "--methods", "budget_tokens": "--budgets", "hgca.window_tokens": "--budgets"}.get(key)
                fix = f"give {flag}" if flag else "leave it out"
                raise ConfigError(f"--set {key}: the bench sets this key itself, for each of its servers; {fix}")
        for budget in self.budgets:
            if budget >= 1 and budget % page:
                raise ConfigError(f"--budgets: got {budget}, expected a multiple of the page size {page}")
            if 1 <= budget <= always * page:
                raise ConfigError(
                    f"--budgets: got {budget}, expected more than the sinks and recent pages, always attended; "
                    f"write {(always + 1) * page} or more"
                )


Run = tuple[str, float]  # method, budget


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
        plan.check()
        same_settings(
            out,
            {"dtype": plan.dtype, "overrides": plan.overrides, "fidelity tokens": plan.fidelity_tokens,
             "in place": plan.in_place, **({"engine flags": list(plan.flags)} if plan.flags else {})},
        )  # fmt: skip
        self.plan, self.out, self.console = plan, out, console
        self.results, self.dense = Results(out / "results.jsonl"), DenseAnswers(out / "dense")
        self.tokenizer = ModelTokenizer(plan.directory)
        self.cases = list(cases(plan, self.tokenizer))
        self.page, self.exact = plan.config.page_size, set(plan.config.exact_layers)
        self.done, self.asked, self.started = 0, 0, time.monotonic()

    def tokens(self, budget: float, case: Case) -> int:
        """Of a budget, in whole pages."""
        return math.ceil(budget * len(case.ids) / self.page) * self.page if budget < 1 else int(budget)

    def keys(self, method: str, budget: float) -> list[tuple[Key, Case]]:
        """What a method is asked. Prompts within its budget are left out: there it is exact by promise."""
        plan = self.plan
        question = "prompt" if method == STOCK else plan.question
        return [
            (Key(plan.model, method, budget, c.task.name, c.length, c.sample, question, c.digest), c)
            for c in self.cases
            if not budget or len(c.ids) > self.tokens(budget, c)
        ]

    def run(self) -> bool:
        """Whether everything is done; False if time was up before."""
        servers = [(runs, self._missing(runs)) for runs in self.plan.servers()]
        self.asked = sum(len(keys) for _, missing in servers for keys in missing.values())
        count = sum(map(len, self.plan.servers())) - 1
        self.console.print(
            f"{counted(len(self.cases), 'prompt')}, {counted(count, 'run')}, {counted(self.asked, 'answer')} to get"
        )
        try:
            for runs, missing in servers:
                if missing:
                    self._run(runs, missing)
        except OutOfTime:
            self.console.print("time is up; the same command goes on from here")
            return False
        return True

    def _missing(self, runs: Sequence[Run]) -> dict[Case, list[Key]]:
        """What is not known yet, prompt by prompt, the dense answer first."""
        found: dict[Case, list[Key]] = {case: [] for case in self.cases}
        for method, budget in runs:
            for key, case in self.keys(method, budget):
                if key not in self.results or (method == STOCK and key not in self.dense):
                    found[case].append(key)
        return {case: keys for case, keys in found.items() if keys}

    def _run(self, runs: Sequence[Run], missing: dict[Case, list[Key]]) -> None:
        self._check_time()
        method, budget = runs[-1]
        at_once = self.plan.at_once
        with self._server(method, budget) as server, ThreadPoolExecutor(max(AT_ONCE, at_once)) as pool:
            is_metered = method not in (STOCK, *WHOLE) and self.plan.is_metered
            meter = MassMeter(server, self.exact) if is_metered else None
            asked = list(missing.items())
            for some in (asked[at:][:at_once] for at in range(0, len(asked), at_once)):
                self._check_time()
                # The first computes the prompt; the others find it in the prefix cache, and dense answers in the files.
                for part in (slice(1), slice(1, None)):
                    several = [(key, case) for case, keys in some for key in keys[part]]
                    for result in pool.map(lambda one: self._answer(server, one[0], one[1], meter), several):
                        self.results.add(result)
                        self._tell(result)

    def _answer(self, server: Server, key: Key, case: Case, meter: MassMeter | None) -> Result:
        began = time.monotonic()
        result = self._dense(server, key, case) if key.method == STOCK else self._sparse(server, key, case, meter)
        return replace(result, seconds=round(time.monotonic() - began, 2))

    def _check_time(self) -> None:
        if time.monotonic() > self.plan.deadline:
            raise OutOfTime

    def _dense(self, server: Server, key: Key, case: Case) -> Result:
        answer = ask(server, case.ids, case.task.max_tokens, budget=EVERYTHING if self.plan.in_place else 0)
        self.dense.put(key, replace(answer, logprobs=answer.logprobs[: self.plan.fidelity_tokens]))
        text = self.tokenizer.text(answer.tokens)
        return Result(key, score(case.task, text), text)

    def _sparse(self, server: Server, key: Key, case: Case, meter: MassMeter | None) -> Result:
        dense = self.dense.get(key)
        budget = self.tokens(key.budget, case) if self.plan.in_place else 0
        decoded = self.plan.question == "decode"
        prompt, question = (case.ids[: case.split], case.ids[case.split :]) if decoded else (case.ids, ())
        skip = len(question)
        answer = ask(server, prompt, case.task.max_tokens, begin=question, ends=self.tokenizer.ends, budget=budget)
        steps = len(answer.tokens) - 1
        mine, followed = answer.tokens[skip:], answer.logprobs[skip:]
        wanted = len(dense.logprobs)
        if mine[: wanted - 1] != dense.tokens[: wanted - 1]:  # it left the dense path: follow that to compare
            again = ask(server, prompt, 0, begin=[*question, *dense.tokens[:wanted]], budget=budget)
            followed, steps = again.logprobs[skip:], steps + len(again.tokens) - 1
        near = fidelity(dense.logprobs, followed[:wanted], first=0 if decoded else 1)
        text = self.tokenizer.text(mine)
        mass = meter.since_last(steps) if meter is not None else None
        return Result(key, score(case.task, text), text, near.kl, near.agreement, near.positions, mass)

    def _server(self, method: str, budget: float) -> AbstractContextManager[Server]:
        plan, logs = self.plan, self.out / "logs"
        most = str(max(AT_ONCE, plan.at_once))
        flags = ["--dtype", plan.dtype, "--max-num-seqs", most, "--enforce-eager", *FIDELITY_FLAGS]
        if method == STOCK:
            pool = str(plan.pool)
            pooled = [*flags, "--kv-cache-memory-bytes", pool, *plan.flags]
            return stock_server(logs, plan.directory, pooled, plan.model, FIDELITY_ENVIRONMENT)
        usual = {"host_pool.size": plan.pool, **({} if plan.in_place else {"staging_tokens": 64 * self.page})}
        keys = {**usual, **plan.overrides, **plan.own(method, budget)}
        return hybrid_server(logs, keys, [*flags, *plan.flags], model=plan.model, environment=FIDELITY_ENVIRONMENT)

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


def name_of(method: str, budget: float) -> str:
    if not budget:
        return method
    return f"{method}@{budget:.0%}" if budget < 1 else f"{method}@{budget:.0f}"


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
