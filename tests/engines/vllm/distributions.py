"""Distributions of the next token, at the positions of some texts that fit every budget of the tests."""

from __future__ import annotations

from bench.fidelity import follow
from tests.engines.server import Server
from tests.engines.texts import tokens_of_prose

SHORT = (40, 300, 700)


def short_distributions(server: Server) -> list[list[dict[int, float]]]:
    return [follow(server, *_short(length)) for length in SHORT]


def _short(length: int) -> tuple[list[int], list[int]]:
    return tokens_of_prose(length, 900 * length), tokens_of_prose(24, 901 * length)
