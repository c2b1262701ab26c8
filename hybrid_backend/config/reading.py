"""Reads files that users name. Every failure becomes one line with the file, the reason and the fix.

`reading` is the only place that translates exceptions of libraries. A parser may raise anything for a damaged file:
KeyError, IndexError, RecursionError, OverflowError, a class of its own.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from hybrid_backend.config.paths import user_path
from hybrid_backend.errors import ConfigError, HybridError, clipped

MOST_BYTES = 1 << 28
"""Default size limit of a file in bytes: a device file or a wrong path must not fill the memory."""
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def reading(
    name: object, fix: str = "", error_class: type[HybridError] = ConfigError, form: str = ""
) -> Iterator[None]:
    """Translate every exception of the block into ``error_class``, with the message ``name: reason; fix``.

    Args:
        name: file or argument that is read.
        fix: what the user can do.
        error_class: class of the error. A `HybridError` that the block raises passes unchanged.
        form: what the block parses, such as YAML; empty: it only reads.
    """
    try:
        yield
    except HybridError:
        raise
    except Exception as error:
        message = f"{name}: {reason_of(error, form)}"
        raise error_class(f"{message}; {fix}" if fix else message) from error


def reason_of(error: Exception, form: str = "") -> str:
    """Say in a few words why something could not be read, from the exception that a library raised."""
    match error:
        case FileNotFoundError():
            return "no such file"
        case OSError():
            return f"cannot be read ({error.strerror or clipped(str(error))})"
        case UnicodeDecodeError():
            return f"not UTF-8 text (byte {error.start})"
        case yaml.MarkedYAMLError() if mark := error.problem_mark or error.context_mark:
            return f"line {mark.line + 1}, column {mark.column + 1}: {clipped(str(error.problem or error.context))}"
        case RecursionError():
            detail = "nested too deeply"
        case MemoryError() | OverflowError():
            detail = "a number or a list in it is too large"
        case ValueError() | yaml.YAMLError():
            detail = clipped(str(error))
        case _:
            detail = f"{type(error).__name__}: {clipped(str(error))}"
    return f"not valid {form} ({detail})" if form else f"cannot be read ({detail})"


def full_disk(message: str) -> OSError | None:
    """Return the OSError behind a message of another program or library, if it says that a disk is full."""
    codes = (code for code in _FULL_DISK if f"(os error {code})" in message or os.strerror(code) in message)
    return next((OSError(code, os.strerror(code)) for code in codes), None)


def read_text(
    path: str | os.PathLike[str],
    fix: str,
    error_class: type[HybridError] = ConfigError,
    name: object = None,
    most: int = MOST_BYTES,
) -> str:
    """Return the content of a UTF-8 file.

    Args:
        path: the file; ``~`` is the home directory.
        fix: what the user can do where the file cannot be read.
        error_class: class of the error.
        name: what messages call the file; its path by default.
        most: size limit in bytes.
    """
    name = path if name is None else name
    with reading(name, fix, error_class), user_path(path).open("rb") as stream:
        content = stream.read(most + 1)
        if len(content) > most:
            raise error_class(f"{name}: larger than {most} bytes; {fix}")
        return content.decode("utf-8")


def parse_json(text: str | bytes, name: object, fix: str, error_class: type[HybridError] = ConfigError) -> Any:
    """Return the value of a JSON text; ``name`` is its file or argument."""
    with reading(name, fix, error_class, "JSON"):
        return json.loads(text)


def read_object(path: str | os.PathLike[str], fix: str, error_class: type[HybridError] = ConfigError) -> dict[str, Any]:
    """Return the JSON object in a file."""
    data = parse_json(read_text(path, fix, error_class), path, fix, error_class)
    if not isinstance(data, dict):
        raise error_class(f"{path}: got {type(data).__name__}, expected a JSON object; {fix}")
    return data


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a file; False for a text that no path can be, such as one that is too long."""
    return os.path.isfile(user_path(path))


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a directory; False for a text that no path can be."""
    return os.path.isdir(user_path(path))
