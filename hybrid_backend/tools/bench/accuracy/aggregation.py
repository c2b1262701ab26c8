"""RULER's tracing and aggregation tasks (arXiv 2404.06654, sections 3.2 and 3.3), our own wording.

``vt``: which variables hold a value, through a chain of assignments hidden in noise; a short solved example comes
first. ``cwe``: the ten words that a list repeats most. ``fwe``: the three most frequent words of a coded text whose
frequencies follow a zeta distribution; its most frequent "word", dots, is to be ignored.
"""

from __future__ import annotations

import random
import string

from hybrid_backend.tools.bench.accuracy.needles import NOISE
from hybrid_backend.tools.bench.accuracy.task import Draft, Generator, Task, Tokenizer, fitted
from hybrid_backend.tools.bench.accuracy.words import filler, invented, numbers, prose_words, unique, vocabulary

HOPS = 4
COMMON = 10
FREQUENT = 3
DOTS = "...."
_ALPHA = 2.0  # RULER's
_RATIO = 10  # how much more often a common word stands in the list: RULER's 30 against 3


def vt(seed: int, budget: int, tokenizer: Tokenizer) -> Task:
    """Variable tracking: one chain of `HOPS` assignments."""

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"vt {seed}")
        variables = unique(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)))
        values = numbers(rng, digits=5)

        def chain(sentences: int) -> tuple[str, str, list[str]]:
            """A text with a chain in it, the value and the variables."""
            value, held = next(values), [next(variables) for _ in range(HOPS + 1)]
            sources = [value] + [f"VAR {name}" for name in held]
            lines = [f"VAR {name} = {source}." for name, source in zip(held, sources, strict=False)]
            depths = sorted(rng.random() for _ in lines)
            body = [NOISE[i % len(NOISE)] for i in range(sentences)]
            for depth, line in sorted(zip(depths, lines, strict=True), reverse=True):
                body.insert(round(depth * sentences), line)
            return " ".join(body), value, held

        example, known, solved = chain(3)
        text, value, held = chain(units)
        return Draft(
            context=f"Track the assignments of variables that are hidden in a text.\n\nText: {example}\n"
            f"{_vt_question(known)}\n{_vt_answer(known)} {', '.join(solved)}\n\n"
            f"Text: {text} {filler(0, words)}".strip(),
            question=_vt_question(value),
            prefix=_vt_answer(value),
            answers=tuple(held),
        )

    return fitted("vt", budget, tokenizer, build, metric="match_all")


def _vt_question(value: str) -> str:
    return f"Which {HOPS + 1} variables hold the value {value} in the text above?"


def _vt_answer(value: str) -> str:
    return f"The {HOPS + 1} variables that hold {value} are:"


def cwe(seed: int, budget: int, tokenizer: Tokenizer) -> Task:
    """Common words extraction. Common words stand `_RATIO` times as often as the others, up to RULER's 30 to 3 times;
    shorter lists have fewer of both."""

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"cwe {seed}")
        common: list[str] = []
        pool = list(vocabulary())
        rng.shuffle(pool)
        while len(common) < COMMON:
            word = pool.pop()
            if not any(word in other or other in word for other in common):
                common.append(word)
        rest = [w for w in pool if not any(c in w for c in common)]  # an uncommon word must not score as a common one
        more = invented(rng, taken=common)
        each = min(30, max(6, units // (2 * COMMON)))
        seldom = max(1, each // _RATIO)
        entries = common * each
        while len(entries) < max(units, COMMON * each):
            entries += [rest.pop() if rest else next(more)] * seldom
        entries = entries[: max(units, COMMON * each)]
        rng.shuffle(entries)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))
        lead = _lead(rng, words)
        return Draft(
            context=f"{lead}A numbered list of words follows. Some of them appear more often than the others. Remember "
            f"those that appear most often.\n\n{numbered}",
            question=f"Which {COMMON} words appear most often in the list above?",
            prefix=f"The {COMMON} words that appear most often in the list are:",
            answers=tuple(common),
        )

    return fitted("cwe", budget, tokenizer, build, metric="match_all", least=COMMON * 6 + 1)


def fwe(seed: int, budget: int, tokenizer: Tokenizer) -> Task:
    """Frequent words extraction. The word of rank k gets the share ``k**-2 / zeta(2)`` of the text."""

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"fwe {seed}")
        coded = invented(rng)
        counts = _zeta_counts(units)
        ranked = [DOTS] + [next(coded) for _ in counts[1:]]
        entries = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
        rng.shuffle(entries)
        lead = _lead(rng, words)
        return Draft(
            context=f"{lead}A coded text follows. Count how often each coded word appears in it; ignore the dots "
            f"'{DOTS}'.\n\n{' '.join(entries)}",
            question=f"Which {FREQUENT} coded words appear most often in the text above?",
            prefix=f"The {FREQUENT} coded words that appear most often are:",
            answers=tuple(ranked[1 : FREQUENT + 1]),
        )

    return fitted("fwe", budget, tokenizer, build, metric="match_all", least=60)


def _lead(rng: random.Random, words: int) -> str:
    """So many words of prose before the list, from anywhere."""
    return f"{filler(rng.randrange(len(prose_words())), words)}\n\n" if words else ""


def _zeta_counts(total: int) -> list[int]:
    """How often the words of rank 1, 2, ... appear; the asked ranks 2 to 4 are never tied with another."""
    zeta = 3.141592653589793**2 / 6
    counts: list[int] = []
    while (left := total - sum(counts)) > 0:
        rank = len(counts) + 1
        counts.append(min(left, max(1, round(total * rank**-_ALPHA / zeta))))
    return counts


GENERATORS: dict[str, Generator] = {"vt": vt, "cwe": cwe, "fwe": fwe}
