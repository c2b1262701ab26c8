"""Key lookups and log-probabilities along a forced text: the fidelity of a sparse method to dense attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_backend.tools.bench.fidelity import Distribution, ask
from tests.engines.server import Server
from tests.engines.texts import PROSE, tokenizer

_ANIMALS = (
    "lion", "tiger", "bear", "wolf", "eagle", "horse", "camel", "goat", "sheep", "donkey", "whale", "raven",
    "sparrow", "dove", "snake", "lizard", "frog", "spider", "beetle", "cricket", "monkey", "otter", "badger", "falcon",
)  # fmt: skip
_WORDS = (
    "copper", "silver", "marble", "cotton", "window", "garden", "pepper", "candle", "hammer", "bottle", "ribbon",
    "basket", "mirror", "pillow", "ladder", "button", "carpet", "kettle", "pencil", "saddle", "anchor", "barrel",
    "feather", "blanket",
)  # fmt: skip


def follow(server: Server, prompt: Sequence[int], text: Sequence[int]) -> list[Distribution]:
    """Return the log-probabilities of the next token by token id at each position of ``text`` after ``prompt``."""
    return ask(server, prompt, 0, begin=text).logprobs


@dataclass(frozen=True)
class Lookup:
    """A fact hidden in prose, the question for it and its answer: all token ids.

    The question is not part of the prompt: it is forced token by token, so that the decoding backend and not the
    (always dense) prefill has to find the fact.
    """

    prompt: list[int]
    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Fact:
    """Wording of a fact about an animal in the prose, and of the question for it."""

    statement: str
    question: str


PASSWORD = Fact("Password of {animal}: {word}. Again, password of {animal}: {word}.", " Password of {animal}:")
# The key right before its value: what a model of 135 million parameters finds in 7,000 tokens most of the time.
PAIR = Fact("The {animal} {word}. Again, the {animal} {word}.", " The {animal}")


def lookups(haystacks: int, facts: int, tokens: int, seed: int = 0, fact: Fact = PASSWORD) -> list[Lookup]:
    """Needle-style key lookups: ``facts`` facts in each of ``haystacks`` texts of about ``tokens`` tokens.

    Each is stated twice in a row, which lifts what a model of 135 million parameters finds. The questions of one
    haystack share it as a prefix, so an engine with prefix caching computes it once.
    """
    rng = random.Random(seed)
    sentences = [s.strip() + "." for s in PROSE.replace("\n", " ").split(".") if s.strip()]
    found = []
    for _ in range(haystacks):
        first = rng.randrange(len(sentences) - 600)
        body: list[str] = []
        length = 0
        while length < tokens - 30 * facts:
            body.append(sentences[first + len(body)])
            length += len(tokenizer()(body[-1]).input_ids)
        passwords = dict(zip(rng.sample(_ANIMALS, facts), rng.sample(_WORDS, facts), strict=True))
        for animal, word in passwords.items():
            place = rng.randrange(len(body) // 20, len(body) * 19 // 20)
            body.insert(place, fact.statement.format(animal=animal, word=word))
        prompt = list(tokenizer()(" ".join(body)).input_ids)
        found += [
            Lookup(
                prompt,
                list(tokenizer()(fact.question.format(animal=animal)).input_ids),
                list(tokenizer()(f" {word}").input_ids),
            )
            for animal, word in passwords.items()
        ]
    return found


def answers_in_a_row(server: Server, asked: Sequence[Lookup]) -> list[bool]:
    """Return whether each question of one haystack is answered by its answer's most likely tokens, from one request.

    Each question follows the right answers to those before it, which show the form of an answer.
    """
    stop = list(tokenizer()(".").input_ids)
    text: list[int] = []
    places = []
    for lookup in asked:
        text += lookup.question
        places.append(len(text))
        text += lookup.answer + stop
    likely = [max(p, key=p.__getitem__) for p in follow(server, asked[0].prompt, text)]
    return [
        likely[place : place + len(lookup.answer)] == lookup.answer for place, lookup in zip(places, asked, strict=True)
    ]
