"""Needles in a haystack: RULER's eight retrieval tasks (arXiv 2404.06654, section 3 and appendix B), our own wording.

| task | haystack | keys | values | asked |
| --- | --- | --- | --- | --- |
| niah_single_1 | repeated sentences | 1 name | 1 number | it |
| niah_single_2 | prose | 1 name | 1 number | it |
| niah_single_3 | prose | 1 name | 1 UUID | it |
| niah_multikey_1 | prose | 4 names | a number each | one |
| niah_multikey_2 | nothing but needles | names | a number each | one |
| niah_multikey_3 | nothing but needles | UUIDs | a UUID each | one |
| niah_multivalue | prose | 1 name | 4 numbers | all |
| niah_multiquery | prose | 4 names | a number each | all |
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hybrid_backend.tools.bench.accuracy.task import Draft, Generator, Task, Tokenizer, fitted
from hybrid_backend.tools.bench.accuracy.words import filler, listed, names, numbers, prose_words, uuids

NOISE = ("The sky is clear.", "The road is long.", "We walk on.", "A dog barks far away.", "Here we rest, there we go.")


@dataclass(frozen=True)
class _Kind:
    haystack: Literal["noise", "prose", "needles"]
    keys: int = 1
    values: int = 1  # per key
    asked: int = 1  # keys
    uuid_keys: bool = False
    uuid_values: bool = False


_KINDS = {
    "niah_single_1": _Kind("noise"),
    "niah_single_2": _Kind("prose"),
    "niah_single_3": _Kind("prose", uuid_values=True),
    "niah_multikey_1": _Kind("prose", keys=4),
    "niah_multikey_2": _Kind("needles"),
    "niah_multikey_3": _Kind("needles", uuid_keys=True, uuid_values=True),
    "niah_multivalue": _Kind("prose", values=4),
    "niah_multiquery": _Kind("prose", keys=4, asked=4),
}


def _needle(what: str, key: str, value: str) -> str:
    return f"One of the special {what} of {key} is: {value}."


def _make(name: str, kind: _Kind, seed: int, budget: int, tokenizer: Tokenizer) -> Task:
    what = "codes" if kind.uuid_values else "numbers"

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"{name} {seed}")
        start = rng.randrange(len(prose_words()))
        keys = uuids(rng) if kind.uuid_keys else names(rng)
        values = uuids(rng) if kind.uuid_values else numbers(rng)
        chosen = [(next(keys), [next(values) for _ in range(kind.values)]) for _ in range(kind.keys)]
        asked = rng.sample(chosen, kind.asked)
        needles = [_needle(what, key, value) for key, mine in chosen for value in mine]
        rng.shuffle(needles)
        depths = [rng.random() for _ in needles]
        body = _haystack(kind, what, units, start, keys, values)
        for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
            body.insert(_boundary(body, round(depth * len(body))), needle)
        text = ("\n" if kind.haystack == "needles" else " ").join(body)
        of = listed(key for key, _ in asked)
        question = f"What are all the special {what} of {of} that the text above tells?"
        return Draft(
            context=f"A text follows in which some special {what} are hidden. Remember them, I will ask for them.\n\n"
            + f"{text} {filler(start + units, words)}".strip(),
            question=question,
            prefix=f"The special {what} of {of} that the text tells {'are' if kind.asked * kind.values > 1 else 'is'}:",
            answers=tuple(value for _, mine in asked for value in mine),
        )

    return fitted(name, budget, tokenizer, build, metric="match_all")


def _haystack(kind: _Kind, what: str, units: int, start: int, keys: Iterator[str], values: Iterator[str]) -> list[str]:
    """``units`` sentences of noise, words of prose, or needles that nobody asks for."""
    if kind.haystack == "noise":
        return [NOISE[i % len(NOISE)] for i in range(units)]
    if kind.haystack == "prose":
        return filler(start, units).split()
    return [_needle(what, next(keys), next(values)) for _ in range(units)]


def _boundary(body: Sequence[str], place: int) -> int:
    """The end of the sentence that ``place`` is in: needles stand between sentences."""
    while 0 < place < len(body) and body[place - 1][-1] not in ".?!":
        place += 1
    return place


def _generator(name: str, kind: _Kind) -> Generator:
    return lambda seed, budget, tokenizer: _make(name, kind, seed, budget, tokenizer)


GENERATORS: dict[str, Generator] = {name: _generator(name, kind) for name, kind in _KINDS.items()}
