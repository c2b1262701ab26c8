"""Errors for the user. Each message is one line that says what is wrong and how to fix it."""

_WORD_CHARACTERS = 400
_LINE_CHARACTERS = 2000


def clipped(text: str, most: int = 200) -> str:
    """Shorten a text to ``most`` characters; a shortened text ends with three dots."""
    return text if len(text) <= most else text[: most - 3] + "..."


def one_line(text: str) -> str:
    """Return a message as one printable line of at most 2,000 characters, long words shortened."""
    line = clipped(" ".join(clipped(word, _WORD_CHARACTERS) for word in text.split()), _LINE_CHARACTERS)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class HybridError(Exception):
    """An error for the user. Its message is one printable line; the command line prints it without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(HybridError):
    """The configuration cannot be used."""


class EngineError(HybridError):
    """The engine is missing, too old, or refused a setting."""


class ModelError(HybridError):
    """The model cannot be found, fetched or converted."""


class WorkerError(HybridError):
    """A CPU worker failed."""


class DeadlineError(WorkerError):
    """A CPU worker did not answer in time, or pages did not arrive on the device in time."""
