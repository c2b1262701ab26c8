"""The run: dense answers from the stock engine, then every method at every budget on the same prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hybrid_backend.tools.bench.accuracy.client import MassMeter, ask, ask_endpoint
from hybrid_backend.tools.bench.accuracy.fidelity import FIDELITY_ENVIRONMENT, FIDELITY_FLAGS, compare
from hybrid_backend.tools.bench.accuracy.plan import EVERYTHING, WITHOUT_BUDGET, Case, Plan, Run, make_cases
from hybrid_backend.tools.bench.accuracy.scoring import score
from hybrid_backend.tools.bench.accuracy.store import STOCK, DenseAnswers, Key, Result, Results, same_settings
from hybrid_backend.tools.bench.accuracy.task import ModelTokenizer
from hybrid_backend.tools.bench.client import Endpoint
from hybrid_backend.tools.bench.servers import Server, hybrid_server, stock_server
from hybrid_backend.tools.counts import counted

_REQUESTS = 4  # requests in flight if one prompt is: its budgets


class OutOfTimeError(Exception):
    """The plan's deadline has passed."""


class Driver:
    """Runs a plan. Answers that the results already have are not requested again."""

    def __init__(self, plan: Plan, out: Path, console: Console) -> None:
        """Check the plan and read the results in ``out``; ConfigError if they have other settings."""
        plan.check()
        settings = {
            "dtype": plan.dtype, "overrides": plan.overrides, "fidelity tokens": plan.fidelity_tokens,
            "in place": plan.in_place, **({"engine flags": list(plan.flags)} if plan.flags else {}),
        }  # fmt: skip
        same_settings(out, settings)
        self.plan, self.out, self.console = plan, out, console
        self.results, self.dense = Results(out / "results.jsonl"), DenseAnswers(out / "dense")
        self.tokenizer = ModelTokenizer(plan.directory)
        self.cases = list(make_cases(plan, self.tokenizer))
        self.page, self.exact_layers = plan.config.page_size, plan.exact_layers()
        self.done, self.missing, self.start = 0, 0, time.monotonic()

    def tokens(self, budget: float, case: Case) -> int:
        """Return a budget in tokens; a share of the prompt is rounded up to whole pages."""
        return math.ceil(budget * len(case.ids) / self.page) * self.page if budget < 1 else int(budget)

    def keys(self, method: str, budget: float) -> list[tuple[Key, Case]]:
        """Return the answers of a run, without prompts that fit its budget: there every method is exact."""
        question = "prompt" if method == STOCK else self.plan.question
        return [
            (Key(self.plan.model, method, budget, c.task.name, c.length, c.sample, question, c.digest), c)
            for c in self.cases
            if not budget or len(c.ids) > self.tokens(budget, c)
        ]

    def run(self) -> bool:
        """Request all missing answers; return False if the deadline passed before."""
        servers = [(runs, self.missing_keys(runs)) for runs in self.plan.servers()]
        self.missing = sum(len(keys) for _, cases in servers for keys in cases.values())
        count = sum(map(len, self.plan.servers())) - 1
        self.console.print(
            f"{counted(len(self.cases), 'prompt')}, {counted(count, 'run')}, {counted(self.missing, 'answer')} to get"
        )
        try:
            for runs, cases in servers:
                if cases:
                    self.run_server(runs, cases)
        except OutOfTimeError:
            self.console.print("time is up; the same command goes on from here")
            return False
        return True

    def missing_keys(self, runs: Sequence[Run]) -> dict[Case, list[Key]]:
        """Return the missing answers of a server's runs by prompt, the dense answer first."""
        missing: dict[Case, list[Key]] = {case: [] for case in self.cases}
        for method, budget in runs:
            for key, case in self.keys(method, budget):
                if key not in self.results.by_key or (method == STOCK and key not in self.dense):
                    missing[case].append(key)
        return {case: keys for case, keys in missing.items() if keys}

    def run_server(self, runs: Sequence[Run], cases: dict[Case, list[Key]]) -> None:
        """Start a server and request the missing answers of its runs."""
        _check_time(self.plan)
        method, budget = runs[-1]
        at_once = self.plan.at_once
        with self.server(method, budget) as server, ThreadPoolExecutor(max(_REQUESTS, at_once)) as pool:
            has_mass = method not in (STOCK, *WITHOUT_BUDGET) and self.plan.has_mass
            meter = MassMeter(server, self.exact_layers) if has_mass else None
            todo = list(cases.items())
            for first in range(0, len(todo), at_once):
                _check_time(self.plan)
                # A prompt's first answer computes it; later ones take it from the prefix cache and compare with the
                # dense answer, which is the first.
                for number in (slice(1), slice(1, None)):
                    batch = [(key, case) for case, keys in todo[first:][:at_once] for key in keys[number]]
                    for result in pool.map(lambda pair: self.answer(server, pair[0], pair[1], meter), batch):
                        self.results.add(result)
                        self._tell(result)

    def answer(self, server: Server, key: Key, case: Case, meter: MassMeter | None) -> Result:
        """Request one answer."""
        start = time.monotonic()
        result = self._dense(server, key, case) if key.method == STOCK else self._sparse(server, key, case, meter)
        return replace(result, seconds=round(time.monotonic() - start, 2))

    def _dense(self, server: Server, key: Key, case: Case) -> Result:
        answer = ask(server, case.ids, case.task.max_tokens, budget=EVERYTHING if self.plan.in_place else 0)
        self.dense.put(key, replace(answer, logprobs=answer.logprobs[: self.plan.fidelity_tokens]))
        text = self.tokenizer.text(answer.tokens)
        return Result(key, score(case.task, text), text)

    def _sparse(self, server: Server, key: Key, case: Case, meter: MassMeter | None) -> Result:
        dense = self.dense.get(key)
        budget = self.tokens(key.budget, case) if self.plan.in_place else 0
        is_decoded = self.plan.question == "decode"
        prompt, question = (case.ids[: case.split], case.ids[case.split :]) if is_decoded else (case.ids, ())
        answer = ask(server, prompt, case.task.max_tokens, begin=question, ends=self.tokenizer.ends, budget=budget)
        steps = len(answer.tokens) - 1
        tokens, logprobs = answer.tokens[len(question) :], answer.logprobs[len(question) :]
        compared = len(dense.logprobs)
        if tokens[: compared - 1] != dense.tokens[: compared - 1]:
            # Distributions can be compared only along the same text, so the dense answer is forced.
            forced = ask(server, prompt, 0, begin=[*question, *dense.tokens[:compared]], budget=budget)
            logprobs, steps = forced.logprobs[len(question) :], steps + len(forced.tokens) - 1
        near = compare(dense.logprobs, logprobs[:compared], first=0 if is_decoded else 1)
        kl, agreement = (near.kl, near.agreement) if near.positions else (None, None)
        text = self.tokenizer.text(tokens)
        mass = meter.since_last(steps) if meter is not None else None
        return Result(key, score(case.task, text), text, kl, agreement, near.positions, mass)

    def server(self, method: str, budget: float) -> AbstractContextManager[Server]:
        """Return the server of a run, not yet started."""
        plan, logs = self.plan, self.out / "logs"
        most = str(max(_REQUESTS, plan.at_once))
        flags = ["--dtype", plan.dtype, "--max-num-seqs", most, "--enforce-eager", *FIDELITY_FLAGS]
        if method == STOCK:
            flags += ["--kv-cache-memory-bytes", str(plan.pool), *plan.flags]
            return stock_server(logs, plan.directory, flags, plan.model, FIDELITY_ENVIRONMENT)
        usual = {"host_pool.size": plan.pool, **({} if plan.in_place else {"staging_tokens": 64 * self.page})}
        keys = {**usual, **plan.overrides, **plan.own(method, budget)}
        return hybrid_server(logs, keys, [*flags, *plan.flags], model=plan.model, environment=FIDELITY_ENVIRONMENT)

    def _tell(self, result: Result) -> None:
        self.done += 1
        key, seconds = result.key, time.monotonic() - self.start
        minutes_left = (self.missing - self.done) * seconds / self.done / 60
        kl = "" if result.kl is None else f"  KL {result.kl:.4f}  same {result.agreement:.2f}"
        mass = "" if result.mass is None else f"  mass {result.mass:.3f}"
        name = f"{run_name(key.method, key.budget)} {key.task}@{key.length}#{key.sample}"
        line = f"[{self.done}/{self.missing}] {name} score {result.score:.2f}{kl}{mass}  ({minutes_left:.0f} min left)"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def _check_time(plan: Plan) -> None:
    if time.monotonic() > plan.deadline:
        raise OutOfTimeError


def run_name(method: str, budget: float) -> str:
    """Return a run's name, as ``scout@1024``, ``scout@10%`` or ``dense``."""
    if not budget:
        return method
    return f"{method}@{budget:.0%}" if budget < 1 else f"{method}@{budget:.0f}"


def run_endpoint(plan: Plan, endpoint: Endpoint, api: str, out: Path, console: Console) -> bool:
    """Score the answers of a running server; return False if the deadline passed before."""
    tokenizer, results = ModelTokenizer(plan.directory), Results(out / "results.jsonl")
    cases = {
        Key(plan.model, endpoint.url, 0, c.task.name, c.length, c.sample, "prompt", c.digest): c
        for c in make_cases(plan, tokenizer)
    }
    missing = [(key, case) for key, case in cases.items() if key not in results.by_key]
    for number, (key, case) in enumerate(missing, 1):
        if time.monotonic() > plan.deadline:
            console.print("time is up; the same command goes on from here")
            return False
        start, text = time.monotonic(), ask_endpoint(endpoint, api, case.task)
        results.add(Result(key, score(case.task, text), text, seconds=round(time.monotonic() - start, 2)))
        console.print(f"[{number}/{len(missing)}] {key.task}@{key.length}#{key.sample} done", markup=False)
    return True
