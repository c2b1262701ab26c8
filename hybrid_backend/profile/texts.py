"""Texts to profile on, cut into windows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_backend.errors import ConfigError

Encode = Callable[[str], list[int]]
DEFAULT_TEXT = "python-reference"


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


def default_text() -> str:
    """About 120k tokens of English technical prose that every CPython brings along: the language reference's topics."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("this Python comes without pydoc_data; give a text with --text FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_texts(files: Sequence[str | Path]) -> list[tuple[str, str]]:
    """``(name, text)`` of each file; without files the default text."""
    if not files:
        return [(DEFAULT_TEXT, default_text())]
    texts = []
    for file in files:
        try:
            texts.append((Path(file).name, Path(file).expanduser().read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--text {file}: cannot be read ({reason}); give a UTF-8 text file") from None
    return texts


def windows_of(texts: Sequence[tuple[str, str]], encode: Encode, context: int, count: int) -> list[Window]:
    """``count`` windows of ``context`` tokens from each text, evenly spread; they overlap only in a short text.

    Raises:
        ConfigError: a text has fewer tokens than one window.
    """
    windows = []
    for name, text in texts:
        ids = encode(text)
        if len(ids) < context:
            raise ConfigError(
                f"--text {name}: has {len(ids)} tokens, fewer than --context {context}; "
                "give a longer text or a shorter context"
            )
        room = len(ids) - context
        starts = [room * i // max(1, count - 1) for i in range(count)] if count > 1 else [room // 2]
        windows += [Window(name, start, tuple(ids[start : start + context])) for start in dict.fromkeys(starts)]
    return windows
