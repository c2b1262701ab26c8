"""Reference solvers: each reads a prompt as a model does, and nothing else, and answers it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable


def needles(prompt: str) -> str:
    asked = re.search(r"What are all the special (\w+) of (.+?) that the text above tells\?", prompt)
    assert asked is not None
    keys = re.split(r", | and ", asked[2])
    return ", ".join(
        value for key in keys for value in re.findall(rf"special {asked[1]} of {re.escape(key)} is: (\S+)\.", prompt)
    )


def vt(prompt: str) -> str:
    text = prompt.split("Text: ")[-1]
    held = re.findall(r"hold the value (\d+)", text)
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        if source in held:
            held.append(name)
    return ", ".join(held[1:])


def cwe(prompt: str) -> str:
    counted = Counter(re.findall(r"\d+\. (\w+)", prompt)).most_common(11)
    assert counted[9][1] > counted[10][1], "the tenth word is tied with the eleventh"
    return ", ".join(word for word, _ in counted[:10])


def fwe(prompt: str) -> str:
    text = prompt.split("'....'.\n\n")[1].split("\n\n")[0]
    counted = Counter(word for word in text.split() if word != "....").most_common(4)
    assert counted[2][1] > counted[3][1], "the third word is tied with the fourth"
    return ", ".join(word for word, _ in counted[:3])


def qa(prompt: str) -> str:
    question = prompt.split("Question: ")[1]
    person = re.search(r"(?:was|did) (\w+ \w+) (?:born|write)|in which (\w+ \w+) was born", question)
    assert person is not None
    name = person[1] or person[2]
    if "book" in question:
        return _one(rf"Document \d+: {name} was born .*? and wrote the book \"(.+?)\"", prompt)
    town = _one(rf"Document \d+: {name} was born in the town of (\w+)", prompt)
    return _one(rf"Document \d+: {town} is a market town on the river (\w+)", prompt) if "river" in question else town


def _one(pattern: str, text: str) -> str:
    found = re.findall(pattern, text)
    assert len(found) == 1, f"{pattern}: {found}"
    return str(found[0])


_ORDER, _WHO, _TOWN = r"(?P<order>\d+)", r"(?P<customer>\w+ \w+)", r"(?P<town>\w+)"
_WHAT = r"(?P<count>\d+) (?P<item>\w+)"
_SENTENCES = (
    rf"Order {_ORDER} came from {_WHO} of {_TOWN}, who asked for {_WHAT}\.",
    rf"{_WHO}, who lives in {_TOWN}, bought {_WHAT}; this is order {_ORDER}\.",
    rf"In order {_ORDER} the town of {_TOWN} is named: {_WHAT} go to {_WHO}\.",
)


def extraction(prompt: str) -> str:
    """Continues the answer that the prompt begins: ``[{"order": 1234,``."""
    text = prompt.split("Text:\n")[1]
    found = [match for pattern in _SENTENCES for match in re.finditer(pattern, text)]
    records = [{"order": match["order"], **match.groupdict()} for match in sorted(found, key=re.Match.start)]
    return json.dumps(records).split(",", 1)[1]


SOLVERS: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(
        (
            "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
            "niah_multivalue", "niah_multiquery",
        ),
        needles,
    ),
    "vt": vt, "cwe": cwe, "fwe": fwe, "qa_1": qa, "qa_2": qa, "extraction": extraction,
}  # fmt: skip
