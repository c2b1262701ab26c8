"""Tasks: a long text with a question, fitted to a number of prompt tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_backend.config.reading import is_file, read_object
from hybrid_backend.config.rules import is_int, show
from hybrid_backend.errors import ConfigError

TOLERANCE = 8
"""Tokens by which a fitted prompt may be shorter than its budget: about one word of filler."""


@dataclass(frozen=True)
class Draft:
    """A task before it is rendered: the long context, the question after it, and the beginning of the answer."""

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    joint: str = "\n\n"
    """Text between context and question."""

    @property
    def content(self) -> str:
        """The user's turn."""
        return f"{self.context}{self.joint}{self.question}" if self.question else self.context


@dataclass(frozen=True)
class Task:
    """A prompt and its right answers.

    ``prompt[question_index:]`` is the question with all that follows it. ``content`` is the user's turn alone, for chat
    endpoints, ``prefix`` the beginning of the answer. ``metric`` is a name of `scoring.METRICS`.
    """

    name: str
    prompt: str
    question_index: int
    content: str
    prefix: str
    answers: tuple[str, ...]
    metric: str
    max_tokens: int
    classes: tuple[str, ...] = ()


class ModelTokenizer:
    """A Hugging Face tokenizer, with its chat template if it has one. ``ends`` are the tokens that end an answer."""

    def __init__(self, model: str) -> None:
        """Load the tokenizer of a folder; ConfigError if there is none."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise ConfigError(f"--model {model}: no tokenizer there ({first}); give a Hugging Face directory") from None
        self._has_chat = bool(getattr(self._tokenizer, "chat_template", None))
        self._opening = self.render("\0", "").split("\0")[0] if self._has_chat else ""
        tokens = (self._tokenizer.eos_token_id, *end_tokens(Path(model, "generation_config.json")))
        self.ends = frozenset(int(token) for token in tokens if token is not None)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt, or of a beginning of one."""
        # A chat template writes its own special tokens.
        is_templated = bool(self._opening) and text.startswith(self._opening)
        return list(self._tokenizer(text, add_special_tokens=not is_templated).input_ids)

    def render(self, user: str, prefix: str, is_chat: bool = True) -> str:
        """Return the prompt's text: ``user`` as the user's turn, then ``prefix``, with which the answer begins."""
        if not is_chat:
            return user + prefix
        if not self._has_chat:
            return f"{user}\n{prefix}"
        turn = [{"role": "user", "content": user}]
        return str(self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)) + prefix

    def text(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


Generator = Callable[[int, int, ModelTokenizer], Task]
"""Makes a task from a seed, the most prompt tokens, and a tokenizer."""


def fitted(
    name: str,
    budget: int,
    tokenizer: ModelTokenizer,
    build: Callable[[int, int], Draft],
    metric: str,
    least: int = 1,
) -> Task:
    """Return the longest task of at most ``budget`` prompt tokens; ConfigError if ``least`` units are too long.

    ``build`` makes a draft from a number of units (sentences, records or words) and a number of words of filler, which
    fills what is shorter than a unit.
    """

    def tokens(units: int, words: int) -> int:
        draft = build(units, words)
        return len(tokenizer.ids(tokenizer.render(draft.content, draft.prefix)))

    shortest = tokens(least, 0)
    if shortest > budget:
        raise ConfigError(
            f"task {name}: length {budget} is too short, its smallest prompt has {shortest} tokens; give a longer one"
        )
    units = largest(lambda n: tokens(n, 0) <= budget, least)
    words = largest(lambda n: tokens(units, n) <= budget, 0)
    draft = build(units, words)
    # An answer may be twice as long as the right one, and 16 tokens more.
    return finished(name, draft, tokenizer, metric, 16 + 2 * len(tokenizer.ids(", ".join(draft.answers))))


def finished(
    name: str, draft: Draft, tokenizer: ModelTokenizer, metric: str, max_tokens: int, is_chat: bool = True
) -> Task:
    """Return a draft as a task; its prompt has a chat template if ``is_chat``."""
    prompt = tokenizer.render(draft.content, draft.prefix, is_chat)
    question_index = prompt.rindex(draft.question) if draft.question else len(prompt)
    return Task(name, prompt, question_index, draft.content, draft.prefix, draft.answers, metric, max_tokens)


def largest(is_fitting: Callable[[int], bool], least: int) -> int:
    """Return the largest fitting number, where ``least`` fits and nothing fits above a number that does not."""
    step = 1
    while is_fitting(least + step):
        step *= 2
    numbers = range(least + step)
    return bisect_left(numbers, True, lo=least + step // 2, key=lambda number: not is_fitting(number)) - 1


def end_tokens(file: Path) -> list[int]:
    """Return the tokens that end an answer, as a generation_config.json names them; none where there is no file."""
    if not is_file(file):
        return []
    fix = "fetch the model again"
    tokens = read_object(file, fix).get("eos_token_id")
    ends = tokens if isinstance(tokens, list) else [tokens] if tokens is not None else []
    if not all(map(is_int, ends)):
        raise ConfigError(f"{file}: eos_token_id: got {show(tokens)}, expected a token or a list of them; {fix}")
    return ends
