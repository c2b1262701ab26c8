"""Rules for the values of keys, and the sentences that a user reads when a value breaks its rule."""

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
"""Limit of tokens, pages, layers and steps, because native code counts them in 32 bits."""
_SHOWN = 60
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxother = 3, _SHOWN
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class RuleError(Exception):
    """A value breaks a rule.

    Attributes:
        hint: the way out; empty if none can be guessed.
        index: place of the wrong element in a list; None if the value is wrong as a whole.
    """

    def __init__(self, hint: str = "", index: int | None = None) -> None:
        super().__init__(hint)
        self.hint, self.index = hint, index


@dataclass(frozen=True)
class Rule:
    """A rule for one key.

    Attributes:
        allowed: what the key accepts; it completes "expected ...".
        check: returns the value, perhaps converted; raises RuleError if the value breaks the rule.
    """

    allowed: str
    check: Callable[[object], object]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._enforce, handler(source))

    def _enforce(self, value: object) -> object:
        try:
            return self.check(value)
        except RuleError as error:
            element = value if error.index is None else value[error.index]  # type: ignore[index]
            refuse("" if error.index is None else f"[{error.index}]", element, self.allowed, error.hint)


def refuse(key: str, value: object, expected: str, hint: str = "") -> NoReturn:
    """Raise the error of pydantic that `load` turns into "key: got value, expected ... (hint)"."""
    raise PydanticCustomError(
        "hybrid",
        "got {got}, expected {expected}{hint}",
        {"at": key, "got": show(value), "expected": expected, "hint": f" ({hint})" if hint else ""},
    )


def rule(allowed: str, accepts: Callable[[object], bool]) -> Rule:
    """Return a rule for the values that ``accepts`` accepts."""

    def check(value: object) -> object:
        if not accepts(value):
            raise RuleError
        return value

    return Rule(allowed, check)


def is_int(value: object) -> bool:
    """Tell whether a value is an integer that 64 bits hold, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def integer(low: int, most: int = MOST) -> Rule:
    """Return a rule for integers from ``low`` to ``most``."""

    def check(value: object) -> object:
        if not isinstance(value, int) or not is_int(value) or value < low:
            raise RuleError
        if value > most:
            raise RuleError(f"at most {most}")
        return value

    return Rule(f"an integer >= {low}", check)


def number(low: float, high: float = math.inf) -> Rule:
    """Return a rule for finite numbers above ``low`` and up to ``high``."""

    def accepts(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return low < value <= high and value < math.inf

    return rule(f"a number > {low:g}" + (f" and <= {high:g}" if high < math.inf else ""), accepts)


def integer_of(*choices: int) -> Rule:
    """Return a rule that accepts only the given integers."""
    return rule(f"one of {', '.join(map(str, choices))}", lambda v: is_int(v) and v in choices)


def choice(*choices: str) -> Rule:
    """Return a rule that accepts only the given words."""

    def check(value: object) -> object:
        if not isinstance(value, str) or value not in choices:
            raise RuleError(did_you_mean(value, choices))
        return value

    return Rule("one of " + ", ".join(choices) if len(choices) > 1 else choices[0], check)


def named(pattern: str, allowed: str) -> Rule:
    """Return a rule for texts that a regular expression matches as a whole."""
    return rule(allowed, lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None)


def list_of(item: Rule, ordered: bool = False, unique: bool = False, empty: bool = True) -> Rule:
    """Return a rule for lists whose elements obey ``item``; ``empty``: the list may be empty."""
    words = ["a", *(["sorted"] if ordered else []), *([] if empty else ["non-empty"]), "list, each item"]
    allowed = " ".join(words) + f" {item.allowed}" + (", no item twice" if unique else "")

    def check(value: object) -> object:
        if not isinstance(value, list | tuple) or (not value and not empty):
            raise RuleError
        for index, element in enumerate(value):
            try:
                item.check(element)
            except RuleError as wrong:
                raise RuleError(wrong.hint, index) from None
        if unique and len(set(value)) < len(value):
            raise RuleError(f"write {show(sorted(set(value)) if ordered else list(dict.fromkeys(value)))}")
        if ordered and sorted(value) != list(value):
            raise RuleError(f"write {show(sorted(value))}")
        return tuple(value)

    return Rule(allowed, check)


def either(scalar: Rule, sequence: Rule) -> Rule:
    """Return a rule for a single value or a list, each with a rule of its own."""

    def check(value: object) -> object:
        return (sequence if isinstance(value, list | tuple) else scalar).check(value)

    return Rule(f"{scalar.allowed}, or {sequence.allowed}", check)


def auto_or(rule: Rule, word: str = "auto") -> Rule:
    """Return a rule for ``word``, or a value that obeys ``rule``."""

    def check(value: object) -> object:
        if not isinstance(value, str) or value == word:
            return value if value == word else rule.check(value)
        try:
            return rule.check(value)
        except RuleError as wrong:
            raise RuleError(wrong.hint or did_you_mean(value, (word,))) from None

    return Rule(f"{word}, or {rule.allowed}", check)


def parse_size(value: object) -> int:
    """Return the bytes of ``8GiB``, ``512 MiB``, ``1.5GiB`` or a plain number of bytes.

    Raises:
        ValueError: the text is no size; the message is a hint, or empty.
    """
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
    """Return the shortest exact spelling of a number of bytes that `parse_size` reads back."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return size


def check_size(value: object) -> object:
    """Return the bytes of a size; RuleError if it is none."""
    try:
        return parse_size(value)
    except ValueError as error:
        raise RuleError(str(error)) from None


def check_patterns(value: object) -> object:
    """Return a name pattern, or a tuple of several; RuleError if it is neither."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]  # A list of one pattern equals the pattern, so that both hash alike.
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
        # Only the first chunks are read, because the text may have gigabytes.
        for chunk in json.JSONEncoder().iterencode(value):
            text += chunk[:_SHOWN]
            if len(text) > _SHOWN:
                break
    except (TypeError, ValueError, RecursionError):  # JSON cannot express the value.
        text = _repr_of(value)
    return clipped(text, _SHOWN)


def _repr_of(value: object) -> str:
    """Spell a value that JSON has no word for."""
    try:
        return _SHORT.repr(value)
    except Exception:  # A value's own __repr__ may raise anything.
        return f"a value of type {type(value).__name__}"


def did_you_mean(word: object, choices: Sequence[str]) -> str:
    """Ask "did you mean X?" for the choice that is spelled most like ``word``; empty if none is."""
    if not isinstance(word, str):
        return ""
    close = difflib.get_close_matches(word[:_SHOWN].lower(), choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def fail(message: str) -> NoReturn:
    """Raise a ConfigError that hides the exception under way."""
    raise ConfigError(message) from None
