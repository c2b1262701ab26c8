"""Command-line options that the benches share. Each mistake is one line with the option, its value and the fix."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

from hybrid_backend.errors import ConfigError

Number = TypeVar("Number", int, float)


def parse_choice(option: str, value: str, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``choices``; ConfigError otherwise."""
    if value not in choices:
        raise ConfigError(f"{option} {value}: write {' or '.join(choices)}")
    return value


def parse_names(option: str, text: str, noun: str, choices: Collection[str]) -> list[str]:
    """Return the names of a comma-separated list; ConfigError for an empty list or a ``noun`` outside ``choices``."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option}: got {text!r}, expected names separated by commas")
    for name in names:
        if name not in choices:
            raise ConfigError(f"{option}: no {noun} {name!r}; there are {', '.join(choices)}")
    return names


def parse_numbers(option: str, text: str, number: type[Number]) -> list[Number]:
    """Return the positive numbers of a comma-separated list, ``inf`` among floats; ConfigError for anything else."""
    try:
        numbers = [number(item) for item in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(value > 0 for value in numbers):
        form = "whole numbers above zero" if number is int else "numbers above zero or inf"
        raise ConfigError(f"{option} {text}: write {form}, separated by commas")
    return numbers


def parse_limits(option: str, text: str, names: Sequence[str]) -> dict[str, float]:
    """Return the limits of ``ttft:2000,tpot:100`` in milliseconds; ConfigError for names other than ``names``."""
    limits: dict[str, float] = {}
    for item in text.split(","):
        name, _, limit = (field.strip() for field in item.partition(":"))
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = math.nan
        if name not in names or name in limits or not 0 < milliseconds < math.inf:
            form = ",".join(f"{name}:MILLISECONDS" for name in names)
            raise ConfigError(f"{option} {item}: write {form}, each once or not at all")
        limits[name] = milliseconds
    return limits


def format_limits(limits: Mapping[str, float]) -> str:
    """Write limits in milliseconds as ``ttft 2000 ms, tpot 100 ms``."""
    return ", ".join(f"{name} {limit:g} ms" for name, limit in limits.items())


def check_out(folder: Path, file: Path | None = None) -> None:
    """Try to write into the folder (or the file) of ``--out``, so that a long run does not fail at its end."""
    with writing(file or folder):
        # Where a file is in the folder's place, the next line has the better message.
        with suppress(FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        if file is not None and file.exists():
            file.open("a").close()


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes ``--out``, into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror or error}); give another --out") from None
