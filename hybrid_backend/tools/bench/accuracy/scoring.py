"""Scores between 0 and 1 of an answer's text."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hybrid_backend.tools.bench.accuracy.task import Task

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_RECORD = "order"  # the field that names a record


def score(task: Task, text: str) -> float:
    """Return the score of the answer ``text``, which continues the task's prefix."""
    return METRICS[task.metric](task, text)


def match_all(answers: Sequence[str], text: str) -> float:
    """Return the share of the answers in the text, ignoring case (RULER's ``string_match_all``)."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def match_any(answers: Sequence[str], text: str) -> float:
    """Return 1 if the text has one of the answers, ignoring case (RULER's ``string_match_part``)."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def token_f1(answer: str, text: str) -> float:
    """Return the F1 over words, without case, punctuation and articles (SQuAD's, as LongBench uses it)."""
    right, words = _words(answer), _words(text)
    return _f1(sum((Counter(right) & Counter(words)).values()), len(words), len(right))


def rouge_l(answer: str, text: str, split: Callable[[str], Sequence[str]] = str.split) -> float:
    """Return the F1 of the longest common subsequence of words (Lin 2004, ROUGE-L with beta 1) of the whole text."""
    right, words = split(answer.lower()), split(text.lower())
    row = [0] * (len(words) + 1)
    for word in right:
        diagonal = 0
        for i, candidate in enumerate(words, 1):
            above = row[i]
            row[i] = diagonal + 1 if word == candidate else max(above, row[i - 1])
            diagonal = above
    return _f1(row[-1], len(words), len(right))


def rouge_l_characters(answer: str, text: str) -> float:
    """Return `rouge_l` over characters, for Chinese (LongBench segments it into words with jieba)."""
    return rouge_l(answer, text, lambda chinese: "".join(chinese.split()))


def classification(answer: str, text: str, classes: Sequence[str]) -> float:
    """Return ``1 / n`` if the text names n classes, the right one among them; 0 otherwise.

    A class whose name is a part of another named one does not count.
    """
    named = [name for name in classes if name in text]
    named = [name for name in named if not any(name != longer and name in longer for longer in named)]
    return 1 / len(named) if answer in named else 0.0


def retrieval(answer: str, text: str) -> float:
    """Return the share of the text's numbers that are the answer's, as in "Paragraph 7" (LongBench's score)."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(re.findall(r"\d+", answer)[0]) / len(numbers) if numbers else 0.0


def field_f1(records: Sequence[str], text: str) -> float:
    """Return the F1 over (record, field, value) of JSON objects, values compared as text without case.

    Every whole object in the text counts, also in a list that was cut off.
    """
    right, facts = _facts(map(json.loads, records)), _facts(_objects(text))
    return _f1(len(right & facts), len(facts), len(right))


def _facts(records: Iterable[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (str(record.get(_RECORD, "")), field, str(value).strip().lower())
        for record in records
        for field, value in record.items()
        if field != _RECORD
    }


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder, index = json.JSONDecoder(), 0
    while (index := text.find("{", index)) >= 0:
        try:
            value, index = decoder.raw_decode(text, index)
        except (ValueError, RecursionError):
            index += 1
        else:
            yield value


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return _ARTICLES.sub(" ", plain).split()


def _f1(common: int, answered: int, right: int) -> float:
    """Return the harmonic mean of precision and recall."""
    return 2 * common / (answered + right) if common else 0.0


def _best(metric: Callable[[str, str], float], has_line: bool = False) -> Callable[[Task, str], float]:
    """Return the metric's best value over the task's answers, of the text's first line if ``has_line``."""

    def best(task: Task, text: str) -> float:
        text = text.lstrip("\n").split("\n")[0] if has_line else text
        return max(metric(answer, text) for answer in task.answers)

    return best


METRICS: dict[str, Callable[[Task, str], float]] = {
    "match_all": lambda task, text: match_all(task.answers, text),
    "match_any": lambda task, text: match_any(task.answers, text),
    "field_f1": lambda task, text: field_f1(task.answers, task.prefix + text),
    "f1": _best(token_f1),
    "f1_line": _best(token_f1, has_line=True),
    "rouge_l": _best(rouge_l),
    "rouge_l_line": _best(rouge_l, has_line=True),
    "rouge_l_characters": _best(rouge_l_characters),
    "retrieval": _best(retrieval),
    "classification": lambda task, text: _best(lambda a, t: classification(a, t, task.classes), True)(task, text),
}
"""Scores of an answer's text by the metric's name."""
