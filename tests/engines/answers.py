"""Answers of a stock server, shared by all test processes of a run: whoever needs one first asks for it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.server import Server

Distributions = list[list[dict[int, float]]]


class StockAnswers:
    """Answers of the engine without our plugin. Its server is started by the first question whose answer is unknown."""

    def __init__(self, folder: Path, start: Callable[[], AbstractContextManager[Server]], stack: ExitStack) -> None:
        self._folder, self._start, self._stack = folder, start, stack
        self._server: Server | None = None

    def to(self, prompts: Sequence[str], tokens: int, ignore_eos: bool = False) -> list[str]:
        """Greedy completions, one prompt at a time."""
        options = {"extra_body": {"ignore_eos": ignore_eos}}
        return [
            str(self.once([prompt, tokens], lambda server, text=prompt: server.complete(text, tokens, **options)))
            for prompt in prompts
        ]

    def distributions(self, name: str, ask: Callable[[Server], Distributions]) -> Distributions:
        """What ``ask(server)`` found: for each of some texts, at each position, log-probabilities by token id."""
        found = self.once(name, ask)
        return [[{int(token): value for token, value in place.items()} for place in text] for text in found]

    def once(self, question: object, ask: Callable[[Server], Any]) -> Any:
        """``ask(server)``, as JSON keeps it, unless a test of this run asked the same question before."""
        file = self._folder / hashlib.sha256(json.dumps(question).encode()).hexdigest()
        if not file.exists():
            if self._server is None:
                self._server = self._stack.enter_context(self._start())
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(ask(self._server)))
            unfinished.replace(file)
        return json.loads(file.read_text())


@contextmanager
def stock_answers(
    factory: pytest.TempPathFactory, name: str, start: Callable[[Path], AbstractContextManager[Server]]
) -> Iterator[StockAnswers]:
    """``start(folder for logs)`` starts the server; ``name`` tells its settings from those of others."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"answers-{name}"
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        yield StockAnswers(folder, lambda: start(factory.mktemp(f"stock-{name}")), stack)
