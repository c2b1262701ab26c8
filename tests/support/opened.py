"""Engines that a test has started: the fixture ``close_engines`` (tests/conftest.py) closes them when the test ends."""

from __future__ import annotations

from typing import Protocol


class Closable(Protocol):
    """An engine whose ``close`` removes it from `OPENED`."""

    def close(self) -> None: ...


OPENED: list[Closable] = []


def close_all() -> None:
    while OPENED:
        OPENED[-1].close()
