"""All generated tasks by name: RULER's thirteen, of which ``qa_1`` and ``qa_2`` are made here, and ``extraction``.

RULER's questions (arXiv 2404.06654, section 3.4) are about SQuAD and HotpotQA. Here documents about invented people and
towns are made from templates, so that nothing is downloaded and no model knows the answers beforehand.

``extraction`` asks for the records in a text as JSON. The answer needs every part of the text. KV offloading loses most
on such tasks (arXiv 2604.08426, whose Text2JSON this resembles). The score is the F1 over (record, field, value).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hybrid_backend.tools.bench.accuracy import aggregation, needles
from hybrid_backend.tools.bench.accuracy.task import Draft, Generator, ModelTokenizer, Task, fitted
from hybrid_backend.tools.bench.accuracy.words import FIRST_NAMES, filler, invented, prose_words, unique

_TRADES = ("glassblower", "baker", "printer", "clockmaker", "sailor", "painter", "mason", "weaver", "gardener", "smith")
_GOODS = ("wool", "salt", "cheese", "timber", "honey", "lace", "copper", "cider", "pottery", "ropes")
_Person = tuple[str, str, str, str]  # name, town, book, document
_Town = tuple[str, str]  # river, document
_ITEMS_TEXT = "lanterns saddles barrels mirrors blankets kettles violins ladders candles baskets anvils carpets"
_TOKENS_PER_RECORD = 256  # The answer is then a fifth of the prompt; prose fills the rest.
_MOST_RECORDS = 64
_SENTENCES = (
    "Order {order} came from {customer} of {town}, who asked for {count} {item}.",
    "{customer}, who lives in {town}, bought {count} {item}; this is order {order}.",
    "In order {order} the town of {town} is named: {count} {item} go to {customer}.",
)


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


def _question(name: str, hops: int, seed: int, budget: int, tokenizer: ModelTokenizer) -> Task:
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


def _records(rng: random.Random) -> Iterator[dict[str, Any]]:
    coined = invented(rng)
    orders = unique(lambda: str(rng.randrange(1000, 10000)))
    while True:
        yield {
            "order": int(next(orders)),
            "customer": f"{rng.choice(FIRST_NAMES)} {next(coined).capitalize()}",
            "town": next(coined).capitalize(),
            "item": rng.choice(_ITEMS_TEXT.split()),
            "count": rng.randrange(2, 100),
        }


def extraction(seed: int, budget: int, tokenizer: ModelTokenizer) -> Task:
    """Make a task of ``budget / 256`` records (3 to 64) among prose; the answer is a JSON list of all of them."""
    count = min(_MOST_RECORDS, max(3, budget // _TOKENS_PER_RECORD))

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"extraction {seed}")
        start = rng.randrange(len(prose_words()))
        drawn = _records(rng)
        example, *records = (next(drawn) for _ in range(count + 1))
        example_sentence, *sentences = (rng.choice(_SENTENCES).format(**record) for record in (example, *records))
        share = units / count  # words of prose before each record
        body = [
            f"{filler(start + round(i * share), round((i + 1) * share) - round(i * share))} {sentence}".strip()
            for i, sentence in enumerate(sentences)
        ]
        tail = f"\n{filler(start + units, words)}" if words else ""
        return Draft(
            context=f"Orders are hidden in a text. For example, the sentence\n{example_sentence}\n"
            f"becomes\n{json.dumps(example)}\n\nText:\n" + "\n".join(body) + tail,
            question=f"Write all {count} orders of the text above as a JSON list, in the order of the text. Every "
            f"object has the keys {', '.join(example)}. Write nothing but the list.",
            prefix=f'[{{"order": {records[0]["order"]},',
            answers=tuple(json.dumps(record) for record in records),
        )

    task = fitted("extraction", budget, tokenizer, build, metric="field_f1", least=0)
    # The right answer is long, so a quarter more is enough.
    return replace(task, max_tokens=16 + 5 * len(tokenizer.ids(", ".join(task.answers))) // 4)


GENERATORS: dict[str, Generator] = {
    **needles.GENERATORS,
    **aggregation.GENERATORS,
    **{f"qa_{hops}": partial(_question, f"qa_{hops}", hops) for hops in (1, 2)},
    "extraction": extraction,
}
