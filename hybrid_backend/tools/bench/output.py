"""What ``--out`` names: looked at before a long run, not after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from hybrid_backend.errors import ConfigError


def check_folder(out: Path) -> None:
    """Make the folder, and write into it.

    Raises:
        ConfigError: that cannot be done.
    """
    with writing(out):
        _try(out)


def check_file(out: Path) -> None:
    """Make the file's folder, and see that the file can be written.

    Raises:
        ConfigError: it cannot.
    """
    with writing(out):
        _try(out.parent)
        if out.exists():
            out.open("a").close()


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """What goes wrong while ``out`` is written is one line.

    Raises:
        ConfigError: an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror or error}); give another --out") from None


def _try(folder: Path) -> None:
    with suppress(FileExistsError):  # a file is in its place, which the next line tells better
        folder.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=folder).close()
