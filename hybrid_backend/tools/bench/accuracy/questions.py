"""Questions about documents among distractors, like RULER's qa_1 and qa_2 (arXiv 2404.06654, section 3.4).

RULER takes SQuAD and HotpotQA. Here the documents are made from templates about invented people and towns, so that
nothing is downloaded and no model knows the answers beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from hybrid_backend.tools.bench.accuracy.task import Draft, Generator, ModelTokenizer, Task, fitted
from hybrid_backend.tools.bench.accuracy.words import FIRST_NAMES, filler, invented, prose_words

_TRADES = ("glassblower", "baker", "printer", "clockmaker", "sailor", "painter", "mason", "weaver", "gardener", "smith")
_GOODS = ("wool", "salt", "cheese", "timber", "honey", "lace", "copper", "cider", "pottery", "ropes")
_Person = tuple[str, str, str, str]  # name, town, book, document
_Town = tuple[str, str]  # river, document


def _people(rng: random.Random, words: Iterator[str]) -> Iterator[_Person]:
    while True:
        name = f"{rng.choice(FIRST_NAMES)} {next(words).capitalize()}"
        town, book = next(words).capitalize(), f"{next(words).capitalize()} and {next(words).capitalize()}"
        year = rng.randrange(1700, 1950)
        text = (
            f"{name} was born in the town of {town} in {year}. {name} learned the trade of a {rng.choice(_TRADES)}, "
            f'travelled for {rng.randrange(2, 20)} years and wrote the book "{book}" in {year + rng.randrange(25, 60)}.'
        )
        yield name, town, book, text


def _towns(rng: random.Random, words: Iterator[str], first: str) -> Iterator[_Town]:
    """Yield towns; the first one has the name ``first``."""
    town = first
    while True:
        river = next(words).capitalize()
        text = (
            f"{town} is a market town on the river {river}. It has {rng.randrange(2, 90) * 100} inhabitants and is "
            f"known for its {rng.choice(_GOODS)}. Its town hall was built in {rng.randrange(1400, 1700)}."
        )
        yield river, text
        town = next(words).capitalize()


def _make(name: str, hops: int, seed: int, budget: int, tokenizer: ModelTokenizer) -> Task:
    """Make a task whose answer needs ``hops`` documents: that of a person, and that of the person's town of birth."""

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"{name} {seed}")
        start = rng.randrange(len(prose_words()))
        coined = invented(rng)
        people = _people(rng, coined)
        person, town, book, text = next(people)
        towns = _towns(rng, coined, first=town)
        documents = [text]
        if hops == 1:
            question, prefix, answer = rng.choice((
                (f"In which town was {person} born?", f"{person} was born in the town of", town),
                (f"Which book did {person} write?", f"{person} wrote the book", book),
            ))  # fmt: skip
        else:
            answer, town_document = next(towns)
            documents.append(town_document)
            question = f"On which river lies the town in which {person} was born?"
            prefix = f"The town in which {person} was born lies on the river"
        depths = [rng.random() for _ in documents]
        body = [next(towns)[1] if hops == 2 and i % 2 else next(people)[3] for i in range(units)]
        for depth, document in sorted(zip(depths, documents, strict=True), reverse=True):
            body.insert(round(depth * units), document)
        texts = "\n\n".join(f"Document {i}: {document}" for i, document in enumerate(body, 1))
        return Draft(
            context="Answer a question with the help of the documents that follow.\n\n"
            + f"{texts} {filler(start, words)}".strip(),
            question=f"Answer with the help of the documents above, in a few words.\nQuestion: {question}",
            prefix=prefix,
            answers=(answer,),
        )

    return fitted(name, budget, tokenizer, build, metric="match_any")


GENERATORS: dict[str, Generator] = {f"qa_{hops}": partial(_make, f"qa_{hops}", hops) for hops in (1, 2)}
