"""Texts to profile on, cut into windows of tokens."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_backend.config.reading import read_text
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.counts import counted

Encode = Callable[[str], list[int]]
Texts = Sequence[tuple[str, str]]
"""Name and text of each."""
# Modules of the standard library, written in Python in every CPython from 3.10 on.
SOURCES = ("inspect", "tarfile", "typing", "pickle", "subprocess", "configparser")


@dataclass(frozen=True)
class Window:
    """``ids``: the tokens; ``text`` names the file, ``start`` is the first token's place in it."""

    text: str
    start: int
    ids: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.text} @{self.start} +{len(self.ids)}"

    def digest(self) -> str:
        return hashlib.sha256(repr(self.ids).encode()).hexdigest()[:16]


def default_texts() -> Texts:
    """Return the texts of every CPython: its reference (about 120k tokens of English prose) and source code (100k).

    Two kinds, because what holds for prose need not hold for code: see docs/profile.md.
    """
    try:
        from pydoc_data.topics import topics

        specs = [importlib.util.find_spec(name) for name in SOURCES]
        sources = [Path(spec.origin).read_text(encoding="utf-8") for spec in specs if spec and spec.origin]
    except (ImportError, OSError):
        raise ConfigError("this Python comes without its library's texts; give a text with --text FILE") from None
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    return [("python-reference", prose), ("python-source", "\n\n".join(sources))]


def read_texts(flag: str, files: Sequence[str | Path]) -> Texts:
    """The texts of files; ``flag``: what named them.

    Raises:
        ConfigError: a file cannot be read.
    """
    texts = []
    for file in files:
        text = read_text(file, "give a UTF-8 text file", name=f"{flag} {file}")
        texts.append((Path(file).name, text))
    return texts


def windows_of(texts: Texts, encode: Encode, context: int, count: int) -> list[Window]:
    """``count`` windows of ``context`` tokens from each text, evenly spread; they overlap only in a short text.

    Raises:
        ConfigError: a text has fewer tokens than one window.
    """
    windows = []
    for name, text in texts:
        ids = encode(text)
        if len(ids) < context:
            raise ConfigError(
                f"{name}: has {counted(len(ids), 'token')}, fewer than --context {context}; "
                "give a longer text or a shorter context"
            )
        room = len(ids) - context
        starts = [room * i // max(1, count - 1) for i in range(count)] if count > 1 else [room // 2]
        windows += [Window(name, start, tuple(ids[start : start + context])) for start in dict.fromkeys(starts)]
    return windows
