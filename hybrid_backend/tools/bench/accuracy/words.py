"""Raw material of the tasks: English prose, names, numbers and invented words, all from seeded generators."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from uuid import UUID

# Ruth, Jonah, Ecclesiastes, Esther and Mark of the King James Bible (1611, public domain), one book a paragraph.
_PROSE = Path(__file__).with_name("kjv.txt")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_ADJECTIVES_TEXT = (
    "amber ancient bitter bold brave bright brisk broken calm clever cold crisp curly dusty eager early faint fancy "
    "fierce gentle giant glad golden grand grumpy happy hidden hollow honest humble icy jolly keen lazy little lively "
    "lonely loud lucky mellow merry mild misty modern noble odd pale patient plain polite proud quick quiet rapid "
    "rough rusty shiny silent silver sleepy smooth spicy steady sunny swift tidy tiny velvet warm wild windy witty "
    "young zesty"
)
_NOUNS_TEXT = (
    "acorn anchor badger balloon banjo barrel basket beetle bicycle blanket bottle bridge bucket button cactus camera "
    "candle canyon carpet castle cello cherry chimney circus clover compass cookie cricket dolphin donkey dragon "
    "engine falcon feather fiddle forest garden gecko glacier guitar hammer harbor helmet hedgehog igloo island "
    "jacket jigsaw kettle kitten ladder lantern lemon lizard lobster magnet marble meadow mirror monkey muffin napkin "
    "needle ocean orchard otter paddle pancake parrot pebble pencil pepper piano pillow planet puzzle rabbit ribbon "
    "robot rocket saddle sailor salmon sandal spider teapot thunder ticket tiger trumpet tunnel turtle umbrella "
    "valley violin wagon walnut window wizard"
)
_FIRST_NAMES_TEXT = (
    "Ada Alan Bella Boris Clara Dora Edwin Elsa Felix Flora Greta Hugo Ida Ivan Jonas Karla Laura Leon Lydia Marta "
    "Nils Nora Oscar Otto Paula Rosa Selma Silas Tilda Vera Viktor Wanda"
)
_ADJECTIVES, _NOUNS, FIRST_NAMES = _ADJECTIVES_TEXT.split(), _NOUNS_TEXT.split(), _FIRST_NAMES_TEXT.split()


def text() -> str:
    """Return the prose with its paragraphs."""
    return _PROSE.read_text(encoding="utf-8")


@cache
def prose() -> str:
    """Return the prose as one line."""
    return " ".join(text().split())


@cache
def prose_words() -> list[str]:
    """Return the words of the prose."""
    return prose().split()


@cache
def vocabulary() -> list[str]:
    """Return the lower-case words of the prose with 4 to 9 letters, sorted."""
    return sorted({word for word in re.findall(r"[A-Za-z]+", prose()) if word.islower() and 4 <= len(word) <= 9})


@cache
def _is_in_prose(letters: str) -> bool:
    return letters in prose().lower()


def filler(start: int, count: int) -> str:
    """Return ``count`` words of the prose from word ``start`` on; the prose repeats."""
    words = prose_words()
    return " ".join(words[(start + i) % len(words)] for i in range(count))


def random_filler(rng: random.Random, count: int) -> str:
    """Return a paragraph of ``count`` words of the prose from a random word on; empty for 0 words."""
    return f"{filler(rng.randrange(len(prose_words())), count)}\n\n" if count else ""


def unique(draw: Callable[[], str], excluded: Iterable[str] = ()) -> Iterator[str]:
    """Yield drawn words without repeats, and without words that contain an excluded word or are contained in one."""
    seen, excluded = set[str](), [word.lower() for word in excluded]
    while True:
        word = draw()
        if word not in seen and not any(x in word.lower() or word.lower() in x for x in excluded):
            seen.add(word)
            yield word


def names(rng: random.Random) -> Iterator[str]:
    """Yield adjective-noun keys, with a second adjective once a quarter of the pairs is used."""
    count = 0

    def draw() -> str:
        nonlocal count
        count += 1
        words = [rng.choice(_ADJECTIVES), rng.choice(_NOUNS)]
        if count > len(_ADJECTIVES) * len(_NOUNS) // 4:
            words.insert(0, rng.choice(_ADJECTIVES))
        return "-".join(words)

    return unique(draw)


def numbers(rng: random.Random, digits: int = 7) -> Iterator[str]:
    """Yield numbers of so many digits."""
    return unique(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)))


def uuids(rng: random.Random) -> Iterator[str]:
    """Yield UUIDs."""
    return unique(lambda: str(UUID(int=rng.getrandbits(128), version=4)))


def invented(rng: random.Random, excluded: Iterable[str] = ()) -> Iterator[str]:
    """Yield pronounceable words of six letters that the prose does not have."""

    def draw() -> str:
        while True:
            word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))
            if not _is_in_prose(word):
                return word

    return unique(draw, excluded)


def enumerated(items: Iterable[str]) -> str:
    """Write ``a, b and c``."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last
