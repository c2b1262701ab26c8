"""Rules: what one key may hold, and the sentences that a user reads when it does not."""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hybrid_backend.errors import ConfigError, clipped

MOST = 2**31 - 1
"""Of tokens, pages, layers and steps: native code counts them in 32 bits."""
_SHOWN = 60
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxother = 3, _SHOWN
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Wrong(Exception):
    """A value breaks a rule; `index` is its place in a list, `hint` an optional way out."""

    def __init__(self, hint: str = "", index: int | None = None) -> None:
        super().__init__(hint)
        self.hint, self.index = hint, index


@dataclass(frozen=True)
class Rule:
    """What a key accepts: `allowed` completes "expected ...", `check` returns the value or refuses it."""

    allowed: str
    check: Callable[[object], object]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._enforce, handler(source))

    def _enforce(self, value: object) -> object:
        try:
            return self.check(value)
        except Wrong as wrong:
            element = value if wrong.index is None else value[wrong.index]  # type: ignore[index]
            at = "" if wrong.index is None else f"[{wrong.index}]"
            refuse(at, element, self.allowed, wrong.hint)


def refuse(key: str, value: object, expected: str, hint: str = "") -> NoReturn:
    raise PydanticCustomError(
        "hybrid",
        "got {got}, expected {expected}{hint}",
        {"at": key, "got": show(value), "expected": expected, "hint": f" ({hint})" if hint else ""},
    )


def rule(allowed: str, accepts: Callable[[object], bool]) -> Rule:
    def check(value: object) -> object:
        if not accepts(value):
            raise Wrong
        return value

    return Rule(allowed, check)


def is_int(value: object) -> bool:
    """A whole number that native code can hold too."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def integer(low: int, most: int = MOST) -> Rule:
    def check(value: object) -> object:
        if not isinstance(value, int) or not is_int(value) or value < low:
            raise Wrong
        if value > most:
            raise Wrong(f"at most {most}")
        return value

    return Rule(f"an integer >= {low}", check)


def number(low: float, high: float = math.inf) -> Rule:
    def accepts(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return low < value <= high and value < math.inf

    return rule(f"a number > {low:g}" + (f" and <= {high:g}" if high < math.inf else ""), accepts)


def integer_of(*choices: int) -> Rule:
    return rule(f"one of {', '.join(map(str, choices))}", lambda v: is_int(v) and v in choices)


def choice(*choices: str) -> Rule:
    def check(value: object) -> object:
        if not isinstance(value, str) or value not in choices:
            raise Wrong(did_you_mean(value, choices))
        return value

    return Rule("one of " + ", ".join(choices) if len(choices) > 1 else choices[0], check)


def named(pattern: str, allowed: str) -> Rule:
    return rule(allowed, lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None)


def list_of(item: Rule, ordered: bool = False, unique: bool = False, empty: bool = True) -> Rule:
    words = ["a", *(["sorted"] if ordered else []), *([] if empty else ["non-empty"]), "list, each item"]
    allowed = " ".join(words) + f" {item.allowed}" + (", no item twice" if unique else "")

    def check(value: object) -> object:
        if not isinstance(value, list | tuple) or (not value and not empty):
            raise Wrong
        for index, element in enumerate(value):
            try:
                item.check(element)
            except Wrong as wrong:
                raise Wrong(wrong.hint, index) from None
        if unique and len(set(value)) < len(value):
            raise Wrong(f"write {show(sorted(set(value)) if ordered else list(dict.fromkeys(value)))}")
        if ordered and sorted(value) != list(value):
            raise Wrong(f"write {show(sorted(value))}")
        return tuple(value)

    return Rule(allowed, check)


def either(scalar: Rule, other: Rule) -> Rule:
    def check(value: object) -> object:
        return (other if isinstance(value, list | tuple) else scalar).check(value)

    return Rule(f"{scalar.allowed}, or {other.allowed}", check)


def auto_or(rule: Rule, word: str = "auto") -> Rule:
    def check(value: object) -> object:
        if not isinstance(value, str) or value == word:
            return value if value == word else rule.check(value)
        try:
            return rule.check(value)
        except Wrong as wrong:
            raise Wrong(wrong.hint or did_you_mean(value, (word,))) from None

    return Rule(f"{word}, or {rule.allowed}", check)


def parse_size(value: object) -> int:
    """Bytes of `8GiB`, `512 MiB`, `1.5GiB` or a plain number of bytes; ValueError says what is wrong."""
    if isinstance(value, int) and is_int(value) and value > 0:
        return value
    text = value.strip() if isinstance(value, str) else ""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", text)
    if match is None:
        raise ValueError("")
    number, unit = match.groups()
    if unit.upper() not in _UNITS:
        binary = unit[:1].upper() + "iB"
        raise ValueError(f"write {number}{binary}" if binary.upper() in _UNITS else "")
    size = Fraction(number) * _UNITS[unit.upper()]
    if size.denominator != 1 or not 0 < size < 2**63:
        raise ValueError("")
    return int(size)


def format_size(size: int) -> str | int:
    """The shortest exact spelling of a number of bytes that `parse_size` reads back."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return size


def check_size(value: object) -> object:
    try:
        return parse_size(value)
    except ValueError as error:
        raise Wrong(str(error)) from None


def check_patterns(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]  # a list of one means the same as its item, and hashes the same
    return either(PATTERN, list_of(PATTERN, empty=False, unique=True)).check(value)


PATTERN = rule("a non-empty name pattern", lambda v: isinstance(v, str) and v.strip() != "")
BOOL = rule("true or false", lambda v: isinstance(v, bool))
SIZE = Rule("a size > 0 such as 8GiB, 512MiB or a whole number of bytes", check_size)


def show(value: object) -> str:
    """Spell a value as the user wrote it, on one line of at most 60 characters, in bounded time and memory."""
    if isinstance(value, str):
        return clipped(repr(value[:_SHOWN]), _SHOWN)
    text = ""
    try:
        for chunk in json.JSONEncoder().iterencode(value):  # in pieces: the whole text may have gigabytes
            text += chunk[:_SHOWN]
            if len(text) > _SHOWN:
                break
    except (TypeError, ValueError, RecursionError):  # not JSON, circular, or too many digits
        text = _repr_of(value)
    return clipped(text, _SHOWN)


def _repr_of(value: object) -> str:
    """Spell a value that JSON has no word for."""
    try:
        return _SHORT.repr(value)
    except Exception:  # a value's own __repr__ may raise anything
        return f"a value of type {type(value).__name__}"


def did_you_mean(word: object, choices: Sequence[str]) -> str:
    if not isinstance(word, str):
        return ""
    close = difflib.get_close_matches(word[:_SHOWN].lower(), choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def fail(message: str) -> NoReturn:
    raise ConfigError(message) from None
