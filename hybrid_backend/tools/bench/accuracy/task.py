"""One question to a model, and how a prompt is made exactly as long as asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybrid_backend.config.reading import is_file, read_object
from hybrid_backend.config.rules import is_int, show
from hybrid_backend.errors import ConfigError

TOLERANCE = 8  # tokens by which a fitted prompt may stay below its length: about one word of filler


class Tokenizer(Protocol):
    """What a generator needs of a model: its tokens and its chat template."""

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered prompt, or of a part of one."""
        ...

    def render(self, user: str, prefix: str) -> str:
        """The prompt's text: ``user`` as the user's turn, then ``prefix``, with which the answer begins."""
        ...


@dataclass(frozen=True)
class Draft:
    """A task before it is rendered: the long context, the question after it, and how the answer begins."""

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    joint: str = "\n\n"  # between context and question


@dataclass(frozen=True)
class Task:
    """A prompt and what is right.

    ``prompt[question_at:]`` is the question with all that follows it; ``content`` is the user's turn alone (for chat
    endpoints), ``prefix`` how the answer begins. ``metric`` is a name of `scoring.METRICS`.
    """

    name: str
    prompt: str
    question_at: int
    content: str
    prefix: str
    answers: tuple[str, ...]
    metric: str
    max_tokens: int
    classes: tuple[str, ...] = ()


Generator = Callable[[int, int, Tokenizer], Task]


def fitted(
    name: str,
    budget: int,
    tokenizer: Tokenizer,
    build: Callable[[int, int], Draft],
    *,
    metric: str,
    least: int = 1,
) -> Task:
    """The longest task of at most ``budget`` prompt tokens.

    ``build(units, words)`` makes the draft with so many units of its kind (sentences, records, words) and so many
    words of filler, which take up what is less than a unit. The answer may have 16 tokens more than twice its own.

    Raises:
        ConfigError: Even ``least`` units are too long.
    """

    def tokens(units: int, words: int) -> int:
        draft = build(units, words)
        return len(tokenizer.ids(tokenizer.render(_content(draft), draft.prefix)))

    shortest = tokens(least, 0)
    if shortest > budget:
        raise ConfigError(
            f"task {name}: length {budget} is too short, its smallest prompt has {shortest} tokens; give a longer one"
        )
    units = _largest(lambda n: tokens(n, 0) <= budget, least)
    words = _largest(lambda n: tokens(units, n) <= budget, 0)
    draft = build(units, words)
    return finished(name, draft, tokenizer, metric, 16 + 2 * len(tokenizer.ids(", ".join(draft.answers))))


def finished(
    name: str, draft: Draft, tokenizer: Tokenizer, metric: str, max_tokens: int, classes: tuple[str, ...] = ()
) -> Task:
    content = _content(draft)
    prompt = tokenizer.render(content, draft.prefix)
    question_at = prompt.rindex(draft.question) if draft.question else len(prompt)
    return Task(name, prompt, question_at, content, draft.prefix, draft.answers, metric, max_tokens, classes)


def _content(draft: Draft) -> str:
    return f"{draft.context}{draft.joint}{draft.question}" if draft.question else draft.context


def _largest(fits: Callable[[int], bool], least: int) -> int:
    """The largest number that fits, where ``least`` does and fitting is (nearly) monotonous."""
    low, step = least, 1
    while fits(low + step):
        low, step = low + step, 2 * step
    high = low + step  # does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def end_tokens(file: Path) -> list[int]:
    """Return the tokens that end an answer, as a generation_config.json names them; none where there is no file."""
    if not is_file(file):
        return []
    fix = "fetch the model again"
    tokens = read_object(file, fix).get("eos_token_id")
    listed = tokens if isinstance(tokens, list) else [tokens] if tokens is not None else []
    if not all(map(is_int, listed)):
        raise ConfigError(f"{file}: eos_token_id: got {show(tokens)}, expected a token or a list of them; {fix}")
    return listed


class ModelTokenizer:
    """A Hugging Face tokenizer, with its chat template if it has one."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise ConfigError(f"--model {model}: no tokenizer there ({first}); give a Hugging Face directory") from None
        self._chat = bool(getattr(self._tokenizer, "chat_template", None))
        self._opening = self.render("\0", "").split("\0")[0] if self._chat else ""
        self.ends = self._ends(Path(model))

    def _ends(self, model: Path) -> frozenset[int]:
        """Tokens that end an answer: the tokenizer's, and those of generation_config.json."""
        tokens = (self._tokenizer.eos_token_id, *end_tokens(model / "generation_config.json"))
        return frozenset(int(token) for token in tokens if token is not None)

    def ids(self, text: str) -> list[int]:
        # A template writes its own special tokens.
        templated = bool(self._opening) and text.startswith(self._opening)
        return list(self._tokenizer(text, add_special_tokens=not templated).input_ids)

    def render(self, user: str, prefix: str) -> str:
        if not self._chat:
            return f"{user}\n{prefix}"
        turn = [{"role": "user", "content": user}]
        return str(self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)) + prefix

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
