"""Tables of what an adapter refuses. They are checked at start, and docs/support.md is written from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hybrid_backend.errors import EngineError

Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Refusal(Generic[Asked]):
    """A setting that is refused.

    ``what`` and ``fix`` are words of the error; ``found`` returns the exact setting, where ``what`` leaves it open.
    """

    what: str
    is_asked: Callable[[Asked], object]
    fix: str
    found: Callable[[Asked], object] | None = None


def refuse(table: Iterable[Refusal[Asked]], asked: Asked, where: str = "") -> None:
    """Raise EngineError for the first entry that was asked for."""
    for each in table:
        if each.is_asked(asked):
            exactly = f" ({each.found(asked)})" if each.found else ""
            raise EngineError(f"the hybrid backend does not support {each.what}{exactly}{where}; {each.fix}")


def other_backend(stock: str) -> EngineError:
    """The error of `hybrid serve` when the engine flags ask for another attention backend. ``stock``: the engine's own
    command."""
    return EngineError(
        f"--attention-backend: `hybrid serve` serves with ours; leave it out, or use `{stock}` for others"
    )
