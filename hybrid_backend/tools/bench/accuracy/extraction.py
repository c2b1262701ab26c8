"""Context-intensive extraction: a text of many records is to become JSON.

Every part of the text is needed, and needed late in a long answer: the kind of task on which KV offloading loses most
(KV Cache Offloading for Context-Intensive Tasks, arXiv 2604.08426, whose Text2JSON it resembles; texts are our own).
Scored by the F1 over (record, field, value).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hybrid_backend.tools.bench.accuracy.task import Draft, Generator, Task, Tokenizer, fitted
from hybrid_backend.tools.bench.accuracy.words import FIRST_NAMES, filler, invented, prose_words, unique

FIELDS = ("order", "customer", "town", "item", "count")
_ITEMS = (
    "lanterns", "saddles", "barrels", "mirrors", "blankets", "kettles", "violins", "ladders", "candles", "baskets",
    "anvils", "carpets",
)  # fmt: skip
_TOKENS_PER_RECORD = 256  # of the text, so that the answer stays a fifth of the prompt; what is left over is prose
_MOST = 64  # records


def _records(rng: random.Random) -> Iterator[dict[str, Any]]:
    coined = invented(rng)
    orders = unique(lambda: str(rng.randrange(1000, 10000)))
    while True:
        yield {
            "order": int(next(orders)),
            "customer": f"{rng.choice(FIRST_NAMES)} {next(coined).capitalize()}",
            "town": next(coined).capitalize(),
            "item": rng.choice(_ITEMS),
            "count": rng.randrange(2, 100),
        }


def _sentence(rng: random.Random, record: dict[str, Any]) -> str:
    text: str = rng.choice((
        "Order {order} came from {customer} of {town}, who asked for {count} {item}.",
        "{customer}, who lives in {town}, bought {count} {item}; this is order {order}.",
        "In order {order} the town of {town} is named: {count} {item} go to {customer}.",
    ))  # fmt: skip
    return text.format(**record)


def extraction(seed: int, budget: int, tokenizer: Tokenizer) -> Task:
    """``budget / 256`` records (3 to 64) among sentences of prose; the answer is a JSON list of all of them."""
    count = min(_MOST, max(3, budget // _TOKENS_PER_RECORD))

    def build(units: int, words: int) -> Draft:
        rng = random.Random(f"extraction {seed}")
        start = rng.randrange(len(prose_words()))
        drawn = _records(rng)
        example, *records = (next(drawn) for _ in range(count + 1))
        shown = _sentence(rng, example)
        sentences = [_sentence(rng, record) for record in records]
        share = units / count  # words of prose before each record
        body = [
            f"{filler(start + round(i * share), round((i + 1) * share) - round(i * share))} {sentence}".strip()
            for i, sentence in enumerate(sentences)
        ]
        tail = f"\n{filler(start + units, words)}" if words else ""
        return Draft(
            context=f"Orders are hidden in a text. For example, the sentence\n{shown}\n"
            f"becomes\n{json.dumps(example)}\n\nText:\n" + "\n".join(body) + tail,
            question=f"Write all {count} orders of the text above as a JSON list, in the order of the text. Every "
            f"object has the keys {', '.join(FIELDS)}. Write nothing but the list.",
            prefix=f'[{{"order": {records[0]["order"]},',
            answers=tuple(json.dumps(record) for record in records),
        )

    task = fitted("extraction", budget, tokenizer, build, metric="field_f1", least=0)
    # The answer is long as it is: a quarter more is enough.
    return replace(task, max_tokens=16 + 5 * len(tokenizer.ids(", ".join(task.answers))) // 4)


GENERATORS: dict[str, Generator] = {"extraction": extraction}
