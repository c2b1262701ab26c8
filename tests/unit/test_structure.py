"""Rules of the package's structure (docs/how/structures.md), checked on its source."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from hybrid_backend.methods import method_names

ROOT = Path(__file__).parents[2]
# Each layer may import itself and the layers after it.
LAYERS = [
    ["cli"],
    ["tools"],
    ["engines"],
    ["warm_up"],
    ["runtime"],
    ["prompt_chunks"],
    ["memory_plan"],
    ["methods"],
    ["in_place"],
    ["step"],
    ["tiers", "workers"],
    ["attention"],
    ["kernels"],
    ["observe"],
    ["hardware"],
    ["model"],
    ["model_layers"],
    ["batch"],
    ["kernels.kv_format"],
    ["host_memory"],
    ["config"],
    ["errors"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FOLDERS = {"hybrid_backend": ROOT / "hybrid_backend", "hybrid_backend.kernels": ROOT / "kernels"}


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for prefix, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imported(path: Path) -> set[str]:
    """Our modules that a module imports, at the top, in a function or for type checking only."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {member if member in MODULES else node.module for member in members}
    return names & (MODULES.keys() - {"hybrid_backend"})


def written(path: Path) -> set[str]:
    """Our modules that a module names in a text, as in a class path that an engine imports."""
    constants = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    texts = {node.value.partition(":")[0] for node in constants if isinstance(node.value, str)}
    return (texts | {text.rpartition(".")[0] for text in texts}) & (MODULES.keys() - {"hybrid_backend"})


def layer_of(module: str) -> str:
    part = module.partition(".")[2]
    return part if part in RANK else part.partition(".")[0]


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"hybrid_backend"}))
def test_imports_point_one_way(module: str) -> None:
    layer = layer_of(module)
    assert layer in RANK, f"{layer} has no place in the layers: give it one here and in docs/how/structures.md"
    for other in imported(MODULES[module]) | written(MODULES[module]):
        assert RANK[layer_of(other)] >= RANK[layer], f"{module} imports {other}, which lies above it"


def test_every_folder_of_modules_is_a_package_that_a_wheel_holds() -> None:
    """setup.py finds packages by their ``__init__.py``; a checkout imports a folder without one all the same."""
    assert not {path.parent for path in MODULES.values() if not (path.parent / "__init__.py").exists()}


def test_no_imports_go_round_in_a_circle() -> None:
    """Not even with a part of the circle inside a function, or for type checking only."""
    try:
        TopologicalSorter({name: imported(path) - {name} for name, path in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_method_is_named_outside_methods_and_configuration() -> None:
    """If a method needs an ``if method == ...`` elsewhere, its interface is wrong."""
    for module, path in MODULES.items():
        if module.startswith(("hybrid_backend.methods", "hybrid_backend.config")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                texts = [c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
                assert not set(method_names()) & set(texts), f"{path}:{node.lineno} compares with a method's name"


def test_every_folder_is_on_the_map_and_what_the_map_names_exists() -> None:
    """docs/how/structures.md names every part of the package."""
    text = (ROOT / "docs" / "how" / "structures.md").read_text()
    parts = {path.relative_to(ROOT).parts[1] for path in FOLDERS["hybrid_backend"].rglob("*.py")} - {"__init__.py"}
    small = {"errors.py", "host_memory.py", "model.py", "model_layers.py", "config"}  # named in the first lines
    assert not [part for part in parts - small if f"`hybrid_backend/{part}" not in text]
    assert all(part.removesuffix(".py") in text for part in small)
    for name in re.findall(r"`((?:hybrid_backend|kernels|tests|configs|bench|docker)/[\w/.]*)`", text):
        assert (ROOT / name).exists(), f"docs/how/structures.md names {name}"


MOST_FILE_LINES = 400
MOST_CLASS_LINES = 300
MOST_METHODS = 15
"""Methods of the interface `step.method.Method` beside its constructor."""


def test_no_file_has_more_lines_than_a_reader_takes_in_at_a_sitting() -> None:
    sources = [
        path
        for folder in ("hybrid_backend", "kernels", "bench", "tests", "examples")
        for suffix in ("*.py", "*.cpp", "*.h")
        for path in (ROOT / folder).rglob(suffix)
    ]
    assert len(sources) > 500
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources}
    assert not {path: count for path, count in lines.items() if count > MOST_FILE_LINES}


def test_no_class_has_more_than_300_lines() -> None:
    classes = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert not {name: count for name, count in classes.items() if count > MOST_CLASS_LINES}


def test_the_interface_of_methods_stays_small() -> None:
    """A method that only some methods need is a protocol beside the interface."""
    (interface,) = (
        node
        for node in ast.parse(MODULES["hybrid_backend.step.method"].read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Method"
    )
    names = [node.name for node in interface.body if isinstance(node, ast.FunctionDef)]
    assert len(names) - names.count("__init__") <= MOST_METHODS, names
