"""The pages that a stranger reads first, taken apart: prose, blocks of code, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
# A sentence ends where a stop is followed by a space and something that begins a sentence.
_STOP = re.compile(r"(?<=[.!?])[)\"']*\s+(?=[A-Z`\"'(\[*\d])")
_SHORT = re.compile(r"\b(?:e\.g|i\.e|etc|vs|Fig|No)\.$")


class Block(NamedTuple):
    """A fenced block of code.

    Attributes:
        page: path below the repository's root.
        language: what stands behind the fence.
        text: the code.
    """

    page: str
    language: str
    text: str


class Command(NamedTuple):
    """One command of a shell block.

    Attributes:
        page: path below the repository's root.
        variables: assignments before the command.
        words: program and arguments.
    """

    page: str
    variables: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)[:80]}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks() -> list[Block]:
    """Return the fenced blocks of all pages."""
    return [Block(name_of(page), *found) for page in PAGES for found in _FENCE.findall(page.read_text())]


def prose(text: str) -> Iterator[str]:
    """Yield the paragraphs, headings, list items and table cells of a page as plain words; code is one word."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("\n", text), flags=re.S)
    text = re.sub(r"(`+)(.+?)\1", "`code`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=#|\|)|(?<=\|)\n", text):
        part = re.sub(r"^\s*(?:[*-] |\d+\. |#+ )", "", part)
        cells = part.strip().strip("|").split("|") if part.lstrip().startswith("|") else [part]
        yield from (" ".join(cell.split()) for cell in cells if cell.strip(" -\n"))


def sentences(part: str) -> Iterator[str]:
    """Yield the sentences of a paragraph."""
    begun = ""
    for piece in _STOP.split(part):
        begun = f"{begun} {piece}".strip()
        if not _SHORT.search(begun):
            yield begun
            begun = ""
    if begun:
        yield begun


def commands() -> list[Command]:
    """Return the commands of all shell blocks, pipes and lists taken apart."""
    return [command for block in blocks() if block.language == "bash" for command in _commands_of(block)]


def _commands_of(block: Block) -> Iterator[Command]:
    lexer = shlex.shlex(block.text.replace("\\\n", " ").rstrip("\n"), posix=True, punctuation_chars="|&;\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, "#"
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if word.strip("|&;\n"):
            words.append(word)
        elif words:
            count = next((i for i, each in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", each)), len(words))
            yield Command(block.page, tuple(words[:count]), tuple(words[count:]))
            words = []
