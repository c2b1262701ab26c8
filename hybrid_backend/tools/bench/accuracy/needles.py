"""Needles in a haystack: RULER's eight retrieval tasks (arXiv 2404.06654, section 3 and appendix B), reworded.

| task | haystack | keys | values | question |
| --- | --- | --- | --- | --- |
| niah_single_1 | repeated sentences | 1 name | 1 number | the value |
| niah_single_2 | prose | 1 name | 1 number | the value |
| niah_single_3 | prose | 1 name | 1 UUID | the value |
| niah_multikey_1 | prose | 4 names | a number each | one key |
| niah_multikey_2 | only needles | names | a number each | one key |
| niah_multikey_3 | only needles | UUIDs | a UUID each | one key |
| niah_multivalue | prose | 1 name | 4 numbers | all values |
| niah_multiquery | prose | 4 names | a number each | all keys |
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from hybrid_backend.tools.bench.accuracy.task import Draft, Generator, ModelTokenizer, Task, fitted
from hybrid_backend.tools.bench.accuracy.words import enumerated, filler, names, numbers, prose_words, uuids

NOISE = ("The sky is clear.", "The road is long.", "We walk on.", "A dog barks far away.", "Here we rest, there we go.")


@dataclass(frozen=True)
class _Kind:
    """Haystack, keys and values of one task. ``values`` are per key, ``keys_in_question`` of the keys are asked for."""

    haystack: Literal["noise", "prose", "needles"]
    keys: int = 1
    values: int = 1
    keys_in_question: int = 1
    has_uuid_keys: bool = False
    has_uuid_values: bool = False


_KINDS = {
    "niah_single_1": _Kind("noise"),
    "niah_single_2": _Kind("prose"),
    "niah_single_3": _Kind("prose", has_uuid_values=True),
    "niah_multikey_1": _Kind("prose", keys=4),
    "niah_multikey_2": _Kind("needles"),
    "niah_multikey_3": _Kind("needles", has_uuid_keys=True, has_uuid_values=True),
    "niah_multivalue": _Kind("prose", values=4),
    "niah_multiquery": _Kind("prose", keys=4, keys_in_question=4),
}


def _needle(noun: str, key: str, value: str) -> str:
    return f"One of the special {noun} of {key} is: {value}."


def _make(name: str, kind: _Kind, seed: int, budget: int, tokenizer: ModelTokenizer) -> Task:
    noun = "codes" if kind.has_uuid_values else "numbers"

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"{name} {seed}")
        start = rng.randrange(len(prose_words()))
        keys = uuids(rng) if kind.has_uuid_keys else names(rng)
        values = uuids(rng) if kind.has_uuid_values else numbers(rng)
        facts = [(next(keys), [next(values) for _ in range(kind.values)]) for _ in range(kind.keys)]
        targets = rng.sample(facts, kind.keys_in_question)
        needles = [_needle(noun, key, value) for key, key_values in facts for value in key_values]
        rng.shuffle(needles)
        depths = [rng.random() for _ in needles]
        body = _haystack(kind, noun, units, start, keys, values)
        for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
            body.insert(_sentence_end(body, round(depth * len(body))), needle)
        text = ("\n" if kind.haystack == "needles" else " ").join(body)
        target_keys = enumerated(key for key, _ in targets)
        answers = tuple(value for _, key_values in targets for value in key_values)
        return Draft(
            context=f"A text follows in which some special {noun} are hidden. Remember them, I will ask for them.\n\n"
            + f"{text} {filler(start + units, words)}".strip(),
            question=f"What are all the special {noun} of {target_keys} that the text above tells?",
            prefix=f"The special {noun} of {target_keys} that the text tells {'are' if len(answers) > 1 else 'is'}:",
            answers=answers,
        )

    return fitted(name, budget, tokenizer, build, metric="match_all")


def _haystack(kind: _Kind, noun: str, units: int, start: int, keys: Iterator[str], values: Iterator[str]) -> list[str]:
    """Return ``units`` sentences of noise, words of prose, or needles that are not asked for."""
    if kind.haystack == "noise":
        return [NOISE[i % len(NOISE)] for i in range(units)]
    if kind.haystack == "prose":
        return filler(start, units).split()
    return [_needle(noun, next(keys), next(values)) for _ in range(units)]


def _sentence_end(body: Sequence[str], index: int) -> int:
    """Return the index behind the sentence that ``index`` is in, so that needles stand between sentences."""
    while 0 < index < len(body) and body[index - 1][-1] not in ".?!":
        index += 1
    return index


GENERATORS: dict[str, Generator] = {name: partial(_make, name, kind) for name, kind in _KINDS.items()}
