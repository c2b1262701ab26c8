"""From an answer's text to a score between 0 and 1."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybrid_backend.tools.bench.accuracy.task import Task

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_RECORD = "order"  # the field that names a record


def score(task: Task, text: str) -> float:
    """The score of the answer ``text``, which continues the task's prefix."""
    return METRICS[task.metric](task, text)


def match_all(answers: Sequence[str], text: str) -> float:
    """Share of the answers that the text holds, whatever the case (RULER's ``string_match_all``)."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def match_any(answers: Sequence[str], text: str) -> float:
    """1 if the text holds one of the answers (RULER's ``string_match_part``)."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def token_f1(answer: str, text: str) -> float:
    """F1 over the words of both, without case, punctuation and articles (SQuAD's, as LongBench uses it)."""
    wanted, given = _words(answer), _words(text)
    return _f1(sum((Counter(wanted) & Counter(given)).values()), len(given), len(wanted))


def rouge_l(answer: str, text: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, ROUGE-L with beta 1), over the whole text at once."""
    return _longest_common(answer.lower().split(), text.lower().split())


def rouge_l_characters(answer: str, text: str) -> float:
    """The same over characters, for Chinese, which has no spaces (LongBench segments it into words with jieba)."""
    return _longest_common("".join(answer.lower().split()), "".join(text.lower().split()))


def _longest_common(wanted: Sequence[str], given: Sequence[str]) -> float:
    """F1 of the longest common subsequence."""
    row = [0] * (len(given) + 1)
    for word in wanted:
        diagonal = 0
        for i, other in enumerate(given, 1):
            above = row[i]
            row[i] = diagonal + 1 if word == other else max(above, row[i - 1])
            diagonal = above
    return _f1(row[-1], len(given), len(wanted))


def classification(answer: str, text: str, classes: Sequence[str]) -> float:
    """1 for the right class alone; ``1 / n`` if the text names n classes, the right one among them.

    A class whose name is a part of another named one does not count.
    """
    named = [c for c in classes if c in text]
    named = [c for c in named if not any(c != other and c in other for other in named)]
    return 1 / len(named) if answer in named else 0.0


def retrieval(answer: str, text: str) -> float:
    """Share of the numbers in the text that are the one in the answer, "Paragraph 7" (LongBench's retrieval score)."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(re.findall(r"\d+", answer)[0]) / len(numbers) if numbers else 0.0


def field_f1(records: Sequence[str], text: str) -> float:
    """F1 over (record, field, value), for answers that are JSON objects; values are compared as text without case.

    Reads as many objects as the text holds, also from a list that was cut off.
    """
    wanted = _facts(map(json.loads, records))
    given = _facts(_objects(text))
    return _f1(len(wanted & given), len(given), len(wanted))


def _facts(records: Iterator[dict[str, Any]] | map[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (str(record.get(_RECORD, "")), field, str(value).strip().lower())
        for record in records
        for field, value in record.items()
        if field != _RECORD
    }


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
        else:
            if isinstance(found, dict):
                yield found


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return _ARTICLES.sub(" ", plain).split()


def _f1(common: int, given: int, wanted: int) -> float:
    """Harmonic mean of precision and recall."""
    return 2 * common / (given + wanted) if common else 0.0


def _first_line(text: str) -> str:
    return text.lstrip("\n").split("\n")[0]


METRICS: dict[str, Callable[[Task, str], float]] = {
    "match_all": lambda task, text: match_all(task.answers, text),
    "match_any": lambda task, text: match_any(task.answers, text),
    "field_f1": lambda task, text: field_f1(task.answers, task.prefix + text),
    "f1": lambda task, text: max(token_f1(answer, text) for answer in task.answers),
    "f1_line": lambda task, text: max(token_f1(answer, _first_line(text)) for answer in task.answers),
    "rouge_l": lambda task, text: max(rouge_l(answer, text) for answer in task.answers),
    "rouge_l_line": lambda task, text: max(rouge_l(answer, _first_line(text)) for answer in task.answers),
    "rouge_l_characters": lambda task, text: max(rouge_l_characters(answer, text) for answer in task.answers),
    "retrieval": lambda task, text: max(retrieval(answer, text) for answer in task.answers),
    "classification": lambda task, text: max(
        classification(answer, _first_line(text), task.classes) for answer in task.answers
    ),
}
