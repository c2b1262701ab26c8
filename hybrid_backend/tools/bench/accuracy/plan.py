"""The plan of a run: its servers, prompts and budgets, checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.model import read_json, shape_from_config
from hybrid_backend.tools.bench.accuracy.store import STOCK
from hybrid_backend.tools.bench.accuracy.task import ModelTokenizer, Task
from hybrid_backend.tools.bench.accuracy.tasks import GENERATORS
from hybrid_backend.tools.bench.servers import configured

WITHOUT_BUDGET = ("dense", "headinfer")
"""Methods that attend everything."""
WITH_REQUEST_BUDGET = ("quest", "scout", "infinigen")
"""Methods whose requests may have budgets of their own."""
EVERYTHING = 1 << 30
"""Budget in tokens with which every prompt is attended whole."""
Run = tuple[str, float]
"""A method and its budget."""


@dataclass(frozen=True)
class Plan:
    """Arguments of a run.

    ``budgets`` are in tokens, with ``in_place`` below 1 also shares of the prompt. With ``question`` ``decode`` the
    question is forced token by token after the prompt, so that decoding, which is sparse, has to find the answer.
    ``external`` are the tasks of LongBench. Distributions are compared along the first ``fidelity_tokens`` of the dense
    answer. ``in_place`` means one server a method, whose requests have their own budgets, so that a prompt is computed
    once; the first server also gives the dense answers, with everything attended. ``pool`` is in bytes, ``deadline`` in
    seconds of `time.monotonic`.
    """

    model: str
    directory: str
    methods: Sequence[str]
    budgets: Sequence[float]
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    question: str = "prompt"
    external: Sequence[Task] = ()
    external_length: int = 0
    dtype: str = "bfloat16"
    pool: int = 2**30
    fidelity_tokens: int = 64
    in_place: bool = False
    at_once: int = 1
    flags: Sequence[str] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    deadline: float = float("inf")

    def servers(self) -> list[list[Run]]:
        """Return the runs of each server. A server has several runs only if requests have their own budgets."""
        if self.in_place:
            servers = [[(method, budget) for budget in self.budgets] for method in self.methods]
            return [[(STOCK, 0), *servers[0]], *servers[1:]]
        budgets = {method: (0,) if method in WITHOUT_BUDGET else self.budgets for method in self.methods}
        return [[(STOCK, 0)], *([(method, budget)] for method in self.methods for budget in budgets[method])]

    @property
    def has_mass(self) -> bool:
        """Servers answer one request at a time, so that their means give the mass of single answers."""
        return not self.in_place and self.at_once == 1

    @cached_property
    def config(self) -> HybridConfig:
        """Configuration that all hybrid servers share."""
        return configured(self.model, {"budget_tokens": EVERYTHING, **self.overrides})

    def exact_layers(self) -> set[int]:
        """Return the layers that attend every token on all hybrid servers."""
        shape = shape_from_config(read_json(Path(self.directory) / "config.json"), self.model)
        config = self.config.for_layers(shape.attention_windows)
        return {layer for layer in range(len(shape.attention_windows)) if config.is_exact(layer)}

    def own(self, method: str, budget: float) -> dict[str, Any]:
        """Return the configuration keys that make a run's results those of its method and budget."""
        if self.in_place:
            return {"method": method, "sparse": "always"}
        tokens = {"budget_tokens": int(budget), "hgca.window_tokens": int(budget)} if budget else {}
        metered = {"metrics.sample_interval": 1} if self.has_mass else {}
        return {"method": method, **metered, **tokens}

    def check(self) -> None:
        """Raise a ConfigError if a server would refuse a key or a budget, or a key would change what results mean."""
        page, attended = self.config.page_size, self.config.sinks + self.config.recent
        for key in self.own("", 1):
            section, _, name = key.rpartition(".")
            if key in self.overrides or name in self.overrides.get(section, {}):
                flag = {"method": "--methods", "budget_tokens": "--budgets", "hgca.window_tokens": "--budgets"}.get(key)
                fix = f"give {flag}" if flag else "leave it out"
                raise ConfigError(f"--set {key}: the bench sets this key itself, for each of its servers; {fix}")
        for budget in self.budgets:
            if budget >= 1 and budget % page:
                raise ConfigError(f"--budgets: got {budget}, expected a multiple of the page size {page}")
            if 1 <= budget <= attended * page:
                raise ConfigError(
                    f"--budgets: got {budget}, expected more than the sinks and recent pages, always attended; "
                    f"write {(attended + 1) * page} or more"
                )


@dataclass(frozen=True)
class Case:
    """A task's prompt as token ids; ``ids[split:]`` is the question."""

    task: Task
    length: int
    sample: int
    ids: tuple[int, ...]
    split: int

    @property
    def digest(self) -> str:
        """Digest of the prompt and its answers."""
        return sha256(json.dumps([self.ids, self.task.answers, self.task.max_tokens]).encode()).hexdigest()[:16]


def make_cases(plan: Plan, tokenizer: ModelTokenizer) -> Iterator[Case]:
    """Yield the prompts sample by sample, so that an interrupted run has asked all tasks equally often."""
    for sample in range(plan.samples):
        for length in plan.lengths:
            for name in plan.tasks:
                yield _case(GENERATORS[name](sample, length, tokenizer), length, sample, tokenizer)
    samples: dict[str, int] = {}
    for task in plan.external:
        samples[task.name] = samples.get(task.name, -1) + 1
        yield _case(task, plan.external_length, samples[task.name], tokenizer)


def _case(task: Task, length: int, sample: int, tokenizer: ModelTokenizer) -> Case:
    ids, before = tokenizer.ids(task.prompt), tokenizer.ids(task.prompt[: task.question_index])
    split = next((i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), len(before))
    return Case(task, length, sample, tuple(ids), split)
