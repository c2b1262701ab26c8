"""Command-line options that the benches share. Each mistake is one line with the option, its value and the fix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from hybrid_backend.errors import ConfigError


def parse_rates(option: str, text: str) -> list[float]:
    """Return the positive numbers of a comma-separated list, which may have ``inf``; ConfigError for anything else."""
    try:
        rates = [float(item) for item in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        raise ConfigError(f"{option} {text}: write numbers above zero or inf, separated by commas")
    return rates


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


def check_out(folder: Path) -> None:
    """Try to write into the folder of ``--out``, so that a long run does not fail at its end."""
    with writing(folder):
        # Where a file is in the folder's place, the next line has the better message.
        with suppress(FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes ``--out``, into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror or error}); give another --out") from None
