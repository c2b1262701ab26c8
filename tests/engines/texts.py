"""Prompts of a wanted length in tokens, cut from English prose."""

from __future__ import annotations

from functools import cache
from typing import Any

from hybrid_backend.tools.bench.accuracy.words import text
from hybrid_backend.tools.hub import fetch

PROSE = text()


@cache
def tokenizer() -> Any:
    """The demo model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(fetch("smollm2-135m-instruct"))


@cache
def _ids() -> list[int]:
    return list(tokenizer()(PROSE).input_ids)


def english(tokens: int, start: int = 0) -> str:
    """Prose of about ``tokens`` tokens, from token ``start`` of the text."""
    return str(tokenizer().decode(_ids()[start : start + tokens]))


def tokens_of_prose(count: int, start: int = 0) -> list[int]:
    """``count`` token ids of the prose, from token ``start``; wraps around at the end."""
    ids = _ids()
    first = start % (len(ids) - count)
    return ids[first : first + count]
