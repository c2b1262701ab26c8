"""Texts to profile on, cut into windows of tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_backend.config.reading import read_text
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.counts import counted

Encode = Callable[[str], list[int]]
Texts = Sequence[tuple[str, str]]
"""Pairs of a name and a text."""
# CPython has these modules of the standard library in Python from 3.10 on.
SOURCES = ("inspect", "tarfile", "typing", "pickle", "subprocess", "configparser")


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a text. ``text``: the file's name; ``start``: place of the first token in the text."""

    text: str
    start: int
    ids: tuple[int, ...]

    @property
    def label(self) -> str:
        """Name of the window in messages."""
        return f"{self.text} @{self.start} +{len(self.ids)}"


def default_texts() -> Texts:
    """Return the texts of every CPython: its reference (about 120k tokens of English prose) and source code (100k).

    What holds for prose need not hold for code: see docs/lab/profile.md.
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
    """Return the texts of ``files``, which the command-line option ``flag`` named.

    Raises:
        ConfigError: a file cannot be read.
    """
    return [(Path(file).name, read_text(file, "give a UTF-8 text file", name=f"{flag} {file}")) for file in files]


def windows_of(texts: Texts, encode: Encode, context: int, count: int) -> list[Window]:
    """Return ``count`` windows of ``context`` tokens from each text, evenly spread; in a short text they overlap.

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
        starts = [room * i // (count - 1) for i in range(count)] if count > 1 else [room // 2]
        windows += [Window(name, start, tuple(ids[start : start + context])) for start in dict.fromkeys(starts)]
    return windows
