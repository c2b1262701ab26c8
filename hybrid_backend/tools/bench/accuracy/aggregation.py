"""RULER's tracing and aggregation tasks (arXiv 2404.06654, sections 3.2 and 3.3), reworded.

``vt``: the variables that hold a value, through a chain of assignments hidden in noise, after a short solved example.
``cwe``: the ten words that a list repeats most. ``fwe``: the three most frequent words of a coded text whose
frequencies follow a zeta distribution; its most frequent "word", dots, is to be ignored.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator

from hybrid_backend.tools.bench.accuracy.needles import NOISE
from hybrid_backend.tools.bench.accuracy.task import Draft, Generator, ModelTokenizer, Task, fitted
from hybrid_backend.tools.bench.accuracy.words import filler, invented, numbers, random_filler, unique, vocabulary

_VARIABLES = 5
_COMMON = 10
_COMMON_RATIO = 10  # RULER's list has its common words 30 times, the others 3 times.
_FREQUENT = 3
_DOTS = "...."


def vt(seed: int, budget: int, tokenizer: ModelTokenizer) -> Task:
    """Make a task of variable tracking, with one chain of assignments."""

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"vt {seed}")
        variables = unique(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)))
        values = numbers(rng, digits=5)
        example, example_value, solution = _chain(rng, variables, next(values), 3)
        text, value, answers = _chain(rng, variables, next(values), units)
        return Draft(
            context=f"Track the assignments of variables that are hidden in a text.\n\nText: {example}\n"
            f"{_vt_question(example_value)}\n{_vt_prefix(example_value)} {', '.join(solution)}\n\n"
            f"Text: {text} {filler(0, words)}".strip(),
            question=_vt_question(value),
            prefix=_vt_prefix(value),
            answers=tuple(answers),
        )

    return fitted("vt", budget, tokenizer, build, metric="match_all")


def _chain(rng: random.Random, variables: Iterator[str], value: str, sentences: int) -> tuple[str, str, list[str]]:
    """Return a text of noise with a chain of assignments in it, the chain's value and its variables."""
    chain = [next(variables) for _ in range(_VARIABLES)]
    sources = [value] + [f"VAR {name}" for name in chain]
    lines = [f"VAR {name} = {source}." for name, source in zip(chain, sources, strict=False)]
    depths = sorted(rng.random() for _ in lines)
    body = [NOISE[i % len(NOISE)] for i in range(sentences)]
    for depth, line in sorted(zip(depths, lines, strict=True), reverse=True):
        body.insert(round(depth * sentences), line)
    return " ".join(body), value, chain


def _vt_question(value: str) -> str:
    return f"Which {_VARIABLES} variables hold the value {value} in the text above?"


def _vt_prefix(value: str) -> str:
    return f"The {_VARIABLES} variables that hold {value} are:"


def cwe(seed: int, budget: int, tokenizer: ModelTokenizer) -> Task:
    """Make a task of common words extraction. Short lists have fewer repetitions of common and other words."""

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"cwe {seed}")
        common: list[str] = []
        pool = list(vocabulary())
        rng.shuffle(pool)
        while len(common) < _COMMON:
            candidate = pool.pop()
            if not any(candidate in word or word in candidate for word in common):
                common.append(candidate)
        # An uncommon word must not score as a common one.
        uncommon = [word for word in pool if not any(c in word for c in common)]
        coined = invented(rng, excluded=common)
        repetitions = min(30, max(6, units // (2 * _COMMON)))
        entries = common * repetitions
        length = max(units, len(entries))
        while len(entries) < length:
            entries += [uncommon.pop() if uncommon else next(coined)] * max(1, repetitions // _COMMON_RATIO)
        entries = entries[:length]
        rng.shuffle(entries)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))
        return Draft(
            context=f"{random_filler(rng, words)}A numbered list of words follows. Some of them appear more often than "
            f"the others. Remember those that appear most often.\n\n{numbered}",
            question=f"Which {_COMMON} words appear most often in the list above?",
            prefix=f"The {_COMMON} words that appear most often in the list are:",
            answers=tuple(common),
        )

    return fitted("cwe", budget, tokenizer, build, metric="match_all", least=_COMMON * 6 + 1)


def fwe(seed: int, budget: int, tokenizer: ModelTokenizer) -> Task:
    """Make a task of frequent words extraction. The word of rank k has the share ``k**-2 / zeta(2)`` of the text."""

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"fwe {seed}")
        coined = invented(rng)
        counts = _zeta_counts(units)
        ranked = [_DOTS] + [next(coined) for _ in counts[1:]]
        entries = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
        rng.shuffle(entries)
        return Draft(
            context=f"{random_filler(rng, words)}A coded text follows. Count how often each coded word appears in it; "
            f"ignore the dots '{_DOTS}'.\n\n{' '.join(entries)}",
            question=f"Which {_FREQUENT} coded words appear most often in the text above?",
            prefix=f"The {_FREQUENT} coded words that appear most often are:",
            answers=tuple(ranked[1 : _FREQUENT + 1]),
        )

    return fitted("fwe", budget, tokenizer, build, metric="match_all", least=60)


def _zeta_counts(total: int) -> list[int]:
    """Return the frequencies of the words of rank 1, 2, ...; those of the answers, ranks 2 to 4, are not tied."""
    zeta = math.pi**2 / 6
    counts: list[int] = []
    while (left := total - sum(counts)) > 0:
        rank = len(counts) + 1
        counts.append(min(left, max(1, round(total * rank**-2.0 / zeta))))
    return counts


GENERATORS: dict[str, Generator] = {"vt": vt, "cwe": cwe, "fwe": fwe}
