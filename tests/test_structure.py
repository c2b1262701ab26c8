"""The house's rules, checked on its source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hybrid_backend.methods import method_names

ROOT = Path(__file__).parents[1]
# Each layer may import itself and the layers after it.
LAYERS = [
    ["cli"],
    ["profile", "doctor"],
    ["engines"],
    ["plan"],
    ["runtime"],
    ["methods"],
    ["tiers", "workers"],
    ["attention"],
    ["simulate"],
    ["hardware"],
    ["kernels"],
    ["observe", "hub", "status"],
    ["step"],
    ["host_memory"],
    ["config"],
    ["errors"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def sources() -> list[tuple[str, Path]]:
    """``(layer, file)`` of every module of the package, `kernels` included."""
    found = [
        (p.relative_to(ROOT / "hybrid_backend").parts[0].removesuffix(".py"), p)
        for p in (ROOT / "hybrid_backend").rglob("*.py")
    ]
    found += [("kernels", p) for p in (ROOT / "kernels").rglob("*.py")]
    return [(layer, path) for layer, path in found if layer != "__init__"]


def imported(path: Path) -> set[str]:
    """Our layers that a module imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
            if node.module == "hybrid_backend":
                modules = [f"hybrid_backend.{alias.name}" for alias in node.names]
        names |= {m.split(".")[1] for m in modules if m.startswith("hybrid_backend.")}
    return names - {"__version__"}


@pytest.mark.parametrize(
    ("layer", "path"), sources(), ids=lambda x: str(x.relative_to(ROOT)) if isinstance(x, Path) else x
)
def test_imports_point_one_way(layer: str, path: Path) -> None:
    assert layer in RANK, f"{layer} has no place in the layers: give it one here and in docs/structures.md"
    for other in imported(path):
        assert RANK[other] >= RANK[layer], f"{path.relative_to(ROOT)} imports {other}, which lies above it"


def test_no_method_is_named_outside_methods_and_configuration() -> None:
    """If a method needs an ``if method == ...`` elsewhere, its interface is wrong."""
    for layer, path in sources():
        if layer in ("methods", "config"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                texts = [c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
                assert not set(method_names()) & set(texts), f"{path}:{node.lineno} compares with a method's name"


def test_every_module_is_on_the_map() -> None:
    """docs/structures.md names every module."""
    text = (ROOT / "docs" / "structures.md").read_text()
    missing = [
        str(p.relative_to(ROOT))
        for _, p in sources()
        if p.name != "__init__.py" and str(p.relative_to(ROOT)) not in text
    ]
    assert not missing, f"not in docs/structures.md: {missing}"
