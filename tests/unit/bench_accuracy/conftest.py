"""Shared by the tests of the accuracy bench."""

from __future__ import annotations

import re

import pytest

from hybrid_backend.tools.bench.accuracy.task import ModelTokenizer


class Pieces(ModelTokenizer):
    """A tokenizer without a model: words in pieces of four letters, everything else letter by letter."""

    def __init__(self) -> None:
        """Without a model."""

    def ids(self, text: str) -> list[int]:
        return [sum(map(ord, piece)) for piece in re.findall(r" ?[A-Za-z]{1,4}|.|\n", text)]

    def render(self, user: str, prefix: str, is_chat: bool = True) -> str:
        return user + prefix if not is_chat else f"<user>{user}</user>\n<assistant>{prefix}"


@pytest.fixture(scope="session")
def pieces() -> Pieces:
    return Pieces()
