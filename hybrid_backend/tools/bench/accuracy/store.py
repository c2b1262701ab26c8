"""Results on disk: one JSON line per answer, so that an interrupted run goes on where it stopped."""

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


@dataclass(frozen=True)
class Key:
    """What one answer is an answer to. ``budget`` is in tokens, or a share of the prompt below 1, 0 for methods that
    attend everything; ``length`` of the prompt in tokens; ``prompt`` a digest of it, so that a changed generator is
    asked anew."""

    model: str
    method: str
    budget: float
    task: str
    length: int
    sample: int
    question: str  # in the prompt, or decoded
    prompt: str


@dataclass(frozen=True)
class Result:
    key: Key
    score: float
    text: str
    kl: float | None = None  # nats, mean over ``positions``
    agreement: float | None = None
    positions: int = 0
    mass: float | None = None  # attention mass on what sparse layers attended
    seconds: float = 0.0


_RESULT = TypeAdapter(Result)


class Results:
    """An append-only file of results."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._known = {result.key: result for result in self._read()}

    def _read(self) -> Iterator[Result]:
        if not self._file.exists():
            return
        *lines, last = read_text(self._file, "move the file away").split("\n")
        if last:  # a run was killed while it wrote
            with self._file.open("r+b") as file:
                file.truncate(len("".join(line + "\n" for line in lines).encode()))
        for number, line in enumerate(lines, 1):
            try:
                yield _RESULT.validate_json(line)
            except ValidationError:
                raise ConfigError(f"{self._file}: line {number} is not a result; remove the line or the file") from None

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def all(self) -> list[Result]:
        return list(self._known.values())

    def add(self, result: Result) -> None:
        self._known[result.key] = result
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def same_settings(folder: Path, settings: dict[str, object]) -> None:
    """Remember what all results of a folder have in common; ConfigError if it holds results of others."""
    file = folder / "settings.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    elif (before := read_object(file, "move the folder away")) != settings:
        names = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
        told = ", ".join(f"{clipped(key)} {clipped(str(before.get(key)))}" for key in names)
        raise ConfigError(f"--out {folder}: holds results with {told}; give the same again, or another --out")


_ANSWER = TypeAdapter(tuple[list[int], list[dict[int, float]]])


class DenseAnswers:
    """The dense model's answers with their distributions, one compressed file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, key: Key) -> Path:
        return self._folder / f"{sha256(json.dumps([key.model, key.prompt]).encode()).hexdigest()[:24]}.json.gz"

    def __contains__(self, key: Key) -> bool:
        return self._file(key).exists()

    def get(self, key: Key) -> Answer:
        with reading(self._file(key), "remove the file, so that the answer is asked for again", form="answer"):
            tokens, logprobs = _ANSWER.validate_json(gzip.decompress(self._file(key).read_bytes()))
            return Answer(tokens, logprobs)

    def put(self, key: Key, answer: Answer) -> None:
        write_whole(self._file(key), gzip.compress(json.dumps([answer.tokens, answer.logprobs]).encode(), 5))
