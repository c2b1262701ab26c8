"""Prompts of a wanted length in tokens, cut from English prose."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hybrid_backend.tools.bench.servers import DEMO
from hybrid_backend.tools.hub import fetch

# Ruth, Jonah, Ecclesiastes, Esther and Mark of the King James Bible (1611, public domain), one book a paragraph.
PROSE = (Path(__file__).parents[1] / "support" / "kjv.txt").read_text(encoding="utf-8")


@cache
def tokenizer(model: str = DEMO) -> Any:
    """Of a model of the catalog."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(fetch(model))


@cache
def _ids(model: str = DEMO) -> list[int]:
    return list(tokenizer(model)(PROSE).input_ids)


def english(tokens: int, start: int = 0) -> str:
    """Prose of about ``tokens`` tokens, from token ``start`` of the text."""
    return str(tokenizer().decode(_ids()[start : start + tokens]))


def tokens_of_prose(count: int, start: int = 0, model: str = DEMO) -> list[int]:
    """``count`` token ids of the prose, from token ``start``; wraps around at the end."""
    ids = _ids(model)
    first = start % (len(ids) - count)
    return ids[first : first + count]
