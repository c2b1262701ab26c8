"""The engine that is installed has what we lean on, and our table of that is complete."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hybrid_backend.engines.probe import Engine, Sources, folder_of
from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.vllm.compat import VLLM

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def known(engine: ModuleType) -> Engine:
    return VLLM if engine.NAME == "vllm" else SGLANG


def test_the_installed_version_has_all_that_we_lean_on(known: Engine) -> None:
    assert known.missing() == []


def test_looking_takes_a_tenth_of_a_second(known: Engine) -> None:
    """At start nobody waits for it: the engine's own imports take a hundred times as long."""
    taken = []
    for _ in range(5):
        before = time.process_time()
        known.missing()
        taken.append(time.process_time() - before)
    assert min(taken) < 0.1


def overrides(package: str, sources: Sources) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Methods of our classes that a class of the engine has as well, as ``Class.method``."""
    folder = ROOT / "hybrid_backend" / "engines" / package
    trees = [ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))]
    origins = {
        alias.asname or alias.name: (node.module, alias.name)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package
        for alias in node.names
    }
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def theirs(name: str) -> Iterator[str]:
        if name in origins:
            found = sources.find(*origins[name])
            yield from (each.source for each in sources.family(found)) if found else ()
        elif name in classes:
            for base in classes[name].bases:
                yield from theirs(ast.unparse(base).partition("[")[0])

    for name, node in classes.items():
        source = "\n".join(theirs(name))
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and f"\n    def {each.name}(" in source.replace("async def", "def"):
                yield f"{name}.{each.name}", each


def test_every_method_that_we_override_is_in_the_table_with_our_parameters(known: Engine) -> None:
    folder = folder_of(known.package)
    assert folder is not None
    found = list(overrides(known.package, Sources(folder)))
    assert len(found) > 15
    takes = {(lean.symbol.rpartition(".")[2].rpartition(":")[2], lean.takes) for lean in known.leans}
    named = {each for lean in known.leans for each in (*lean.has, *(lean.defines or ()))}
    lacking = []
    for place, method in found:
        spec = method.args
        if spec.vararg or spec.kwarg:  # takes whatever it is given
            lacking += [] if method.name in named or method.name == "__init__" else [place]
            continue
        names = tuple(each.arg for each in (*spec.args, *spec.kwonlyargs) if each.arg not in ("self", "cls"))
        # A method without parameters, which not every version has, is in `defines` alone.
        is_there = (method.name, names) in takes or (not names and method.name in named)
        lacking += [] if is_there else [f"{place}{names}"]
    assert lacking == []
