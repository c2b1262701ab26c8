"""Engine flags on the command line of `hybrid serve`, the same for all engines, and errors about them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from hybrid_backend.errors import EngineError, HybridError


def flag_names(words: Iterable[str]) -> set[str]:
    """Return the names of the flags among command-line words, spelled with dashes."""
    return {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("-")}


def help_flags(words: Iterable[str]) -> list[str]:
    """Return the words that ask for the engine's help, such as ``--help=KVCache``."""
    return [word for word in words if word == "-h" or word.startswith("--help")]


def served_name(model: str, served_as: str, extra: Sequence[str]) -> list[str]:
    """Return the flag for the name under which a model is served; empty if it is the model's name or the user's own."""
    if model == served_as or "--served-model-name" in flag_names(extra):
        return []
    return ["--served-model-name", served_as]


class RefusingParser:
    """Mixin for an engine's parser of flags, which raises EngineError instead of ending the process."""

    prog: str

    def error(self, message: str) -> NoReturn:
        """Refuse a flag, and say how the engine's flags are listed."""
        raise EngineError(f"{message}; engine flags are listed by `{self.prog} --help`")


@contextmanager
def engine_errors(logger: logging.Logger, what: str) -> Iterator[None]:
    """Turn whatever an engine raises into an EngineError: engines raise everything from KeyError to AssertionError.

    Args:
        logger: gets the traceback, at level DEBUG.
        what: beginning of the error's line, such as "vLLM cannot serve MODEL".
    """
    try:
        yield
    except HybridError:
        raise
    except Exception as error:
        logger.debug("refused by the engine", exc_info=True)
        raise EngineError(f"{what}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Return the message of any exception in one line."""
    # The text of a pydantic ValidationError has many lines with types and links.
    errors: Any = getattr(error, "errors", None)
    if isinstance(error, ValueError) and callable(errors):
        return "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in errors())
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    return str(error) or type(error).__name__


def refuse_other_backend(is_chosen: bool, stock_command: str) -> None:
    """Raise EngineError if the engine flags ask for another attention backend, which ``stock_command`` serves."""
    if not is_chosen:
        raise EngineError(
            f"--attention-backend: `hybrid serve` serves with ours; leave it out, or use `{stock_command}` for others"
        )
