"""Raw material: English prose, names, numbers and invented words, all drawn from a seeded generator.

Nothing is downloaded.
"""

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
_ADJECTIVES = (
    "amber", "ancient", "bitter", "bold", "brave", "bright", "brisk", "broken", "calm", "clever", "cold", "crisp",
    "curly", "dusty", "eager", "early", "faint", "fancy", "fierce", "gentle", "giant", "glad", "golden", "grand",
    "grumpy", "happy", "hidden", "hollow", "honest", "humble", "icy", "jolly", "keen", "lazy", "little", "lively",
    "lonely", "loud", "lucky", "mellow", "merry", "mild", "misty", "modern", "noble", "odd", "pale", "patient", "plain",
    "polite", "proud", "quick", "quiet", "rapid", "rough", "rusty", "shiny", "silent", "silver", "sleepy", "smooth",
    "spicy", "steady", "sunny", "swift", "tidy", "tiny", "velvet", "warm", "wild", "windy", "witty", "young", "zesty",
)  # fmt: skip
_NOUNS = (
    "acorn", "anchor", "badger", "balloon", "banjo", "barrel", "basket", "beetle", "bicycle", "blanket", "bottle",
    "bridge", "bucket", "button", "cactus", "camera", "candle", "canyon", "carpet", "castle", "cello", "cherry",
    "chimney", "circus", "clover", "compass", "cookie", "cricket", "dolphin", "donkey", "dragon", "engine", "falcon",
    "feather", "fiddle", "forest", "garden", "gecko", "glacier", "guitar", "hammer", "harbor", "helmet", "hedgehog",
    "igloo", "island", "jacket", "jigsaw", "kettle", "kitten", "ladder", "lantern", "lemon", "lizard", "lobster",
    "magnet", "marble", "meadow", "mirror", "monkey", "muffin", "napkin", "needle", "ocean", "orchard", "otter",
    "paddle", "pancake", "parrot", "pebble", "pencil", "pepper", "piano", "pillow", "planet", "puzzle", "rabbit",
    "ribbon", "robot", "rocket", "saddle", "sailor", "salmon", "sandal", "spider", "teapot", "thunder", "ticket",
    "tiger", "trumpet", "tunnel", "turtle", "umbrella", "valley", "violin", "wagon", "walnut", "window", "wizard",
)  # fmt: skip
FIRST_NAMES = (
    "Ada", "Alan", "Bella", "Boris", "Clara", "Dora", "Edwin", "Elsa", "Felix", "Flora", "Greta", "Hugo", "Ida",
    "Ivan", "Jonas", "Karla", "Laura", "Leon", "Lydia", "Marta", "Nils", "Nora", "Oscar", "Otto", "Paula", "Rosa",
    "Selma", "Silas", "Tilda", "Vera", "Viktor", "Wanda",
)  # fmt: skip


def text() -> str:
    """The prose as it is."""
    return _PROSE.read_text(encoding="utf-8")


@cache
def prose() -> str:
    return " ".join(text().split())


@cache
def prose_words() -> tuple[str, ...]:
    return tuple(prose().split())


@cache
def vocabulary() -> tuple[str, ...]:
    """Plain words of the prose, 4 to 9 letters, sorted."""
    return tuple(sorted({w for w in re.findall(r"[A-Za-z]+", prose()) if w.islower() and 4 <= len(w) <= 9}))


@cache
def _in_prose(part: str) -> bool:
    return part in prose().lower()


def filler(start: int, count: int) -> str:
    """``count`` words of the prose from word ``start``; wraps around at the end."""
    words = prose_words()
    return " ".join(words[(start + i) % len(words)] for i in range(count))


def unique(draw: Callable[[], str], taken: Iterable[str] = ()) -> Iterator[str]:
    """What ``draw`` gives, without repeats and without anything that holds, or is held by, a word of ``taken``."""
    seen, avoid = set[str](), [t.lower() for t in taken]
    while True:
        word = draw()
        if word not in seen and not any(a in word.lower() or word.lower() in a for a in avoid):
            seen.add(word)
            yield word


def names(rng: random.Random) -> Iterator[str]:
    """adjective-noun keys; a second adjective once the pairs grow rare."""
    count = 0

    def draw() -> str:
        nonlocal count
        count += 1
        parts = [rng.choice(_ADJECTIVES), rng.choice(_NOUNS)]
        if count > len(_ADJECTIVES) * len(_NOUNS) // 4:
            parts.insert(0, rng.choice(_ADJECTIVES))
        return "-".join(parts)

    return unique(draw)


def numbers(rng: random.Random, digits: int = 7) -> Iterator[str]:
    return unique(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)))


def uuids(rng: random.Random) -> Iterator[str]:
    return unique(lambda: str(UUID(int=rng.getrandbits(128), version=4)))


def invented(rng: random.Random, syllables: int = 3, taken: Iterable[str] = ()) -> Iterator[str]:
    """Pronounceable words of ``2 * syllables`` letters, none of them in the prose."""

    def draw() -> str:
        while True:
            word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables))
            if not _in_prose(word):
                return word

    return unique(draw, taken)


def listed(items: Iterable[str]) -> str:
    """``a, b and c``."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last
