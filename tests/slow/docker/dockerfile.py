"""A Dockerfile's instructions, as far as ours use them."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
IMAGES = tuple(sorted(path.name for path in DOCKER.glob("Dockerfile.*")))
ENGINES = ("Dockerfile.cpu", "Dockerfile.cuda")
"""Those with an engine; each of the others begins with one of these."""


@dataclass(frozen=True)
class Instruction:
    """``stage``: 0 for the first FROM. ``rest``: everything after the keyword, lines joined."""

    keyword: str
    rest: str
    stage: int

    @property
    def words(self) -> list[str]:
        return [str(word) for word in json.loads(self.rest)] if self.rest.startswith("[") else shlex.split(self.rest)


def instructions(name: str) -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", (DOCKER / name).read_text(), flags=re.M).replace("\\\n", " ")
    found: list[Instruction] = []
    stage = -1
    for line in filter(str.strip, text.splitlines()):
        keyword, rest = line.split(None, 1)
        stage += keyword == "FROM"
        found.append(Instruction(keyword, " ".join(rest.split()), stage))
    return found


def last(name: str, keyword: str) -> Instruction:
    return [i for i in instructions(name) if i.keyword == keyword][-1]


def copies(name: str) -> list[tuple[list[str], str, int]]:
    """``(sources, target, stage)`` of every COPY out of the build context."""
    return [
        (i.words[:-1], i.words[-1], i.stage)
        for i in instructions(name)
        if i.keyword == "COPY" and not i.rest.startswith("--from")
    ]


def in_context(path: Path) -> bool:
    """Whether .dockerignore lets a file through: the last pattern that fits it or a folder above it decides."""
    relative = path.relative_to(ROOT)
    parts = [str(relative), *(str(parent) for parent in relative.parents if parent != Path("."))]
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        globs = [pattern, pattern.removeprefix("**/")] if pattern.startswith("**/") else [pattern]
        names = parts if not pattern.startswith("**/") else [*parts, *(Path(part).name for part in parts)]
        if any(fnmatch.fnmatchcase(part, glob) for part in names for glob in globs):
            kept = line.startswith("!")
    return kept
