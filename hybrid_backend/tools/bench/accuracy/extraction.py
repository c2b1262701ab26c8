"""Context-intensive extraction: the records in a text are to become JSON.

The answer needs every part of the text. KV offloading loses most on such tasks (KV Cache Offloading for
Context-Intensive Tasks, arXiv 2604.08426, whose Text2JSON this resembles). The score is the F1 over
(record, field, value).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hybrid_backend.tools.bench.accuracy.task import Draft, ModelTokenizer, Task, fitted
from hybrid_backend.tools.bench.accuracy.words import FIRST_NAMES, filler, invented, prose_words, unique

_ITEMS_TEXT = "lanterns saddles barrels mirrors blankets kettles violins ladders candles baskets anvils carpets"
_TOKENS_PER_RECORD = 256  # The answer is then a fifth of the prompt; prose fills the rest.
_MOST_RECORDS = 64
_SENTENCES = (
    "Order {order} came from {customer} of {town}, who asked for {count} {item}.",
    "{customer}, who lives in {town}, bought {count} {item}; this is order {order}.",
    "In order {order} the town of {town} is named: {count} {item} go to {customer}.",
)


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
