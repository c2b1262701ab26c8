"""Results on disk, one JSON line per answer, so that an interrupted run continues where it stopped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hybrid_backend.config.paths import write_whole
from hybrid_backend.config.reading import read_object, read_text, reading
from hybrid_backend.errors import ConfigError, clipped
from hybrid_backend.tools.bench.accuracy.client import Answer

STOCK = "stock"
"""Name of the stock engine among the methods."""


@dataclass(frozen=True)
class Key:
    """Identity of an answer.

    ``budget`` is in tokens, below 1 a share of the prompt, and 0 for methods that attend everything. ``length`` is the
    prompt's in tokens. ``question`` is ``prompt`` or ``decode``. ``prompt`` is a digest, so that a changed prompt has
    another key.
    """

    model: str
    method: str
    budget: float
    task: str
    length: int
    sample: int
    question: str
    prompt: str


@dataclass(frozen=True)
class Result:
    """An answer's text and score.

    ``kl`` in nats and ``agreement`` are means over ``positions``, None without any. ``mass`` is the attention mass on
    what sparse layers attended, None if it was not sampled.
    """

    key: Key
    score: float
    text: str
    kl: float | None = None
    agreement: float | None = None
    positions: int = 0
    mass: float | None = None
    seconds: float = 0.0


_RESULT = TypeAdapter(Result)
_ANSWER = TypeAdapter(tuple[list[int], list[dict[int, float]]])


class Results:
    """An append-only file of results. ``by_key`` has all of them."""

    def __init__(self, file: Path) -> None:
        """Read the file, if there is one; ConfigError if a line is no result."""
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.by_key = {result.key: result for result in self._read()}

    def _read(self) -> Iterator[Result]:
        if not self._file.exists():
            return
        *lines, last = read_text(self._file, "move the file away").split("\n")
        if last:
            # A run was killed while it wrote the last line.
            with self._file.open("r+b") as file:
                file.truncate(len("".join(line + "\n" for line in lines).encode()))
        for number, line in enumerate(lines, 1):
            try:
                yield _RESULT.validate_json(line)
            except ValidationError:
                raise ConfigError(f"{self._file}: line {number} is not a result; remove the line or the file") from None

    def add(self, result: Result) -> None:
        """Append a result."""
        self.by_key[result.key] = result
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def same_settings(folder: Path, settings: dict[str, object]) -> None:
    """Write the settings that all results of a folder share; ConfigError if the folder has results of other ones."""
    file = folder / "settings.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    elif (before := read_object(file, "move the folder away")) != settings:
        names = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
        changed = ", ".join(f"{clipped(key)} {clipped(str(before.get(key)))}" for key in names)
        raise ConfigError(f"--out {folder}: holds results with {changed}; give the same again, or another --out")


class DenseAnswers:
    """The dense model's answers with their distributions, one compressed file each."""

    def __init__(self, folder: Path) -> None:
        """Keep the files in ``folder``."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, key: Key) -> Path:
        return self._folder / f"{sha256(json.dumps([key.model, key.prompt]).encode()).hexdigest()[:24]}.json.gz"

    def __contains__(self, key: Key) -> bool:
        """Return whether the key's prompt has a dense answer, whatever the key's method."""
        return self._file(key).exists()

    def get(self, key: Key) -> Answer:
        """Return the dense answer to a key's prompt; ConfigError if its file is damaged."""
        with reading(self._file(key), "remove the file, so that the answer is asked for again", form="answer"):
            return Answer(*_ANSWER.validate_json(gzip.decompress(self._file(key).read_bytes())))

    def put(self, key: Key, answer: Answer) -> None:
        """Write the dense answer to a key's prompt."""
        write_whole(self._file(key), gzip.compress(json.dumps([answer.tokens, answer.logprobs]).encode(), 5))
