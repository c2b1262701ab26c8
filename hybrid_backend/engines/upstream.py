"""Check of an installed engine for everything that its adapter uses, read from sources: nothing is imported.

An import would take seconds and have effects: vLLM's CPU worker changes torch.cuda. Imports and overrides are read
from the adapter's own sources. A `Table` adds what those do not show: attributes, arguments, pieces of text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from logging import Logger
from pathlib import Path
from typing import NamedTuple

from hybrid_backend.errors import EngineError

_DEPTH = 6
"""Steps of imports that are followed from a name to its definition."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


Table = Mapping[str, Mapping[str, str]]
"""Purposes of symbols, which errors quote; for each purpose the symbols; for each symbol what the adapter needs of it.

A symbol is ``module``, ``module:name`` or ``module:Class.method``; places of different versions are joined by `` | ``.
The need is empty, or names of members (``name name``), or arguments that we pass (``(name name)``), or texts of
the module that a patch depends on (in backticks).
"""


@dataclass(frozen=True)
class Range:
    """Versions that were tested, compared by as many numbers as are written: ``0.33`` is every release of 0.33."""

    lowest: str
    highest: str

    def __str__(self) -> str:
        return self.lowest if self.lowest == self.highest else f"{self.lowest} to {self.highest}"

    def warning(self, engine: str, version: str) -> str | None:
        """Return a warning about a version that was not tested; None if it was tested."""
        release, lowest, highest = map(_release, (version, self.lowest, self.highest))
        if release[: len(lowest)] < lowest:
            return f"{engine} {version} is older than what was tested ({self})"
        if release[: len(highest)] > highest:
            return f"{engine} {version} is newer than what was tested ({self})"
        return None


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 0.32.0 of 0.32.0rc1 and of 0.32.0.dev3."""
    match = re.match(r"[\d.]*\d", version)
    return tuple(map(int, match[0].split("."))) if match else ()


@dataclass(frozen=True, eq=False)
class Engine:
    """An engine as its adapter knows it.

    Attributes:
        name: name in messages.
        package: name of the Python package.
        locked: the version that `make` installs, on which the tests run the check.
        tested: versions that were tested.
        fix: how to install a tested version.
        symbols: table of the symbols that the adapter uses besides its imports and overrides.
        adapter: folder of the adapter's sources; None: they are not checked.
    """

    name: str
    package: str
    locked: str
    tested: Range
    fix: str
    symbols: Table
    adapter: Path | None

    def missing(self, version: str | None = None) -> list[str]:
        """Say which symbols that the adapter uses the installed engine lacks. The engine is not imported.

        Args:
            version: the installed version. Nothing is read if it is the locked one, because reading takes a second
                of each start. None: the engine is always read.
        """
        is_locked = version is not None and version.partition("+")[0] == self.locked
        return [] if is_locked else [*_missing(self)]

    def check(self, version: str, missing: Sequence[str]) -> str | None:
        """Check that a version can be used.

        Args:
            version: the installed version.
            missing: the result of `missing`.

        Returns:
            a warning if the version was not tested.

        Raises:
            EngineError: something that the adapter uses is missing.
        """
        if missing:
            raise EngineError(
                f"{self.name} {version} lacks what the hybrid backend uses: {'; '.join(missing)}. "
                f"Tested: {self.tested}; {self.fix}, in an environment of its own"
            )
        return self.tested.warning(self.name, version)

    def check_installed(self, version: str | None) -> str | None:
        """Check the installed engine (`missing`, `check`); ``version`` is None if it is unknown."""
        return self.check(version or "?", self.missing(version))

    def can_register(self, plugin: Table, version: str | None, logger: Logger) -> bool:
        """Tell whether the engine has the plugin functions of a table; log what it lacks.

        Engines load plugins for all users, also for those of other backends. So nothing is refused here.
        """
        missing = replace(self, symbols=plugin, adapter=None).missing()
        if missing:
            logger.error(
                "%s %s lacks what the hybrid backend uses, which stays out: %s", self.name, version, "; ".join(missing)
            )
        return not missing


@cache
def _missing(engine: Engine) -> tuple[str, ...]:
    return tuple(missing_symbols(engine.package, engine.symbols, adapter=engine.adapter))


def missing_symbols(package: str, table: Table, folder: Path | None = None, adapter: Path | None = None) -> list[str]:
    """Say which symbols a package lacks, each with its purpose.

    Args:
        package: the engine's package.
        table: symbols that the adapter's sources do not show.
        folder: folder that holds the package; None: the one from which Python would import it.
        adapter: folder of an adapter, whose imports and overrides are checked too.
    """
    folder = folder or package_folder(package)
    if folder is None:
        return [f"{package}: it cannot be imported"]
    sources = Sources(folder, package)
    problems = []
    for purpose, symbols in table.items():
        for path, need in symbols.items():
            by_place = [list(_place_problems(sources, place, need)) for place in path.split(" | ")]
            problems += [] if [] in by_place else [f"{problem} ({purpose})" for problem in by_place[0]]
    for file in sorted(adapter.glob("*.py")) if adapter else ():
        problems += [f"{problem} ({file.name})" for problem in _adapter_problems(sources, package, file)]
    return list(dict.fromkeys(problems))


def package_folder(package: str) -> Path | None:
    """Return the folder from which Python would import a package; None if it is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


class Definition(NamedTuple):
    """A statement that defines a name, or a whole module, and the module in which it stands."""

    module: str
    node: ast.AST


class Sources:
    """Parsed modules of a package, which lies in a folder. Each module is parsed once."""

    def __init__(self, folder: Path, package: str) -> None:
        self._folder, self._package = folder, package
        self.tree = cache(self._parse)
        self.text = cache(self._read)

    def find(self, module: str, name: str, depth: int = _DEPTH) -> Definition | None:
        """Find the definition of a name in a module, or in the module that it is imported from."""
        tree = self.tree(module)
        if tree is None or depth == 0:
            return self._module(f"{module}.{name}")
        bindings = list(_bindings(tree.body))
        statements = [statement for bound, statement in bindings if bound == name]
        # Of overloads the last one is the function itself. A definition comes before a fallback in its place.
        for statement in reversed(statements):
            if isinstance(statement, _Function | ast.ClassDef):
                return Definition(module, statement)
        for statement in (*statements, *(statement for bound, statement in bindings if bound == "*")):
            if isinstance(statement, ast.ImportFrom):
                original = next((alias.name for alias in statement.names if alias.asname == name), name)
                definition = self.find(self._absolute(module, statement), original, depth - 1)
                if definition is not None:
                    return definition
        return Definition(module, statements[-1]) if statements else self._module(f"{module}.{name}")

    def members(self, definition: Definition, depth: int = _DEPTH) -> dict[str, ast.AST]:
        """Return the members of a class by their names, those of its base classes in the package included."""
        members: dict[str, ast.AST] = {}
        if isinstance(definition.node, ast.ClassDef) and depth > 0:
            for base in reversed(definition.node.bases):
                parent = self.find(definition.module, _name(base))
                members |= self.members(parent, depth - 1) if parent else {}
            members |= self._attributes(definition.module, definition.node) | dict(_bindings(definition.node.body))
        return members

    def _attributes(self, module: str, node: ast.ClassDef) -> dict[str, ast.AST]:
        """Return the attributes that methods of a class set on ``self``. Its text is searched faster than its tree."""
        text = "\n".join(self.text(module).splitlines()[node.lineno - 1 : node.end_lineno])
        return dict.fromkeys(re.findall(r"self\.(\w+)(?=[^=()\n]*=(?!=))", text), node)

    def _module(self, module: str) -> Definition | None:
        tree = self.tree(module)
        return None if tree is None else Definition(module, tree)

    def _file(self, module: str) -> Path:
        path = self._folder.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _parse(self, module: str) -> ast.Module | None:
        is_own = module.partition(".")[0] == self._package and self._file(module).is_file()
        return ast.parse(self.text(module)) if is_own else None

    def _read(self, module: str) -> str:
        return self._file(module).read_text(errors="replace")

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the absolute name of the module that an import names."""
        names = [*module.split("."), ""] if self._file(module).name == "__init__.py" else module.split(".")
        package = names[: -statement.level] if statement.level else []
        return ".".join([*package, *filter(None, [statement.module])])


def _name(base: ast.expr) -> str:
    """Return the name of a base class without its type arguments."""
    return ast.unparse(base).partition("[")[0]


def _bindings(statements: Iterable[ast.AST]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield ``(name, statement)`` for each name that statements of a module or a class bind, also under conditions."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name, statement
            case ast.ImportFrom():
                yield from ((alias.asname or alias.name, statement) for alias in statement.names)
            case ast.Assign():
                yield from ((target.id, statement) for target in statement.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, statement
            case ast.If() | ast.Try() | ast.With() | ast.ExceptHandler():
                yield from _bindings(ast.iter_child_nodes(statement))


def _place_problems(sources: Sources, place: str, need: str) -> Iterator[str]:
    """Yield what is wrong with a symbol at one of its places."""
    module, _, qualified = place.partition(":")
    name, _, method = qualified.partition(".")
    parent, _, leaf = module.rpartition(".")
    definition = sources.find(module, name) if name else sources.find(parent, leaf)
    members = sources.members(definition) if definition else {}
    function = members.get(method or "__init__", None if method else definition and definition.node)
    if definition is None or function is None:
        yield f"no {place}"
    elif need.startswith("`"):
        texts = need.split("`")[1::2]
        yield from (f"{place} is written otherwise: no {text!r}" for text in texts if text not in sources.text(module))
    elif not need.startswith("("):
        yield from (f"no {place}.{member}" for member in need.split() if member not in members)
    elif isinstance(function, _Function):
        parameters, passed = _parameters(function), need.strip("()").split()
        yield from (
            f"{place} takes no {name!r}" for name in passed if name not in parameters and not _is_open(function)
        )
        required = [name for name, is_required in parameters.items() if is_required]
        yield from (f"{place} needs {name!r}, which we do not pass" for name in required if name not in passed)


def _parameters(function: _Function) -> dict[str, bool]:
    """Return which parameters, but for ``self`` and ``cls``, must be passed."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [*[None] * (len(positional) - len(spec.defaults)), *spec.defaults, *spec.kw_defaults]
    required = {
        argument.arg: default is None
        for argument, default in zip([*positional, *spec.kwonlyargs], defaults, strict=True)
    }
    return {name: is_required for name, is_required in required.items() if name not in ("self", "cls")}


def _is_open(function: _Function) -> bool:
    """Tell whether a function takes arguments that it does not name."""
    return function.args.vararg is not None or function.args.kwarg is not None


def _adapter_problems(sources: Sources, package: str, file: Path) -> Iterator[str]:
    """Yield the imports and overrides of an adapter's module that do not fit the engine."""
    tree = ast.parse(file.read_text())
    # Imports for type checkers may fail, and those inside ``try`` have other places in other versions.
    optional = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for child in ast.walk(node)
    }
    parents: dict[str, Definition] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            for alias in node.names:
                definition = sources.find(str(node.module), alias.name)
                if definition is not None:
                    parents[alias.asname or alias.name] = definition
                elif node not in optional:
                    yield f"no {node.module}:{alias.name}"
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    subclassed = {_name(base) for node in classes for base in node.bases}
    for node in classes:
        for base in map(_name, node.bases):
            if base in parents:
                place = f"{parents[base].module}:{base.removeprefix('_')}"
                is_leaf = node.name not in subclassed
                yield from _override_problems(place, sources.members(parents[base]), node, is_leaf)


def _override_problems(place: str, theirs: Mapping[str, ast.AST], node: ast.ClassDef, is_leaf: bool) -> Iterator[str]:
    """Yield the methods of the class ``node`` that do not fit those of its base class in the engine.

    A class that other classes of the adapter derive from (``is_leaf`` is False) may leave abstract methods to them.
    """
    ours = {method.name: method for method in node.body if isinstance(method, _Function)}
    for name, method in ours.items():
        original = theirs.get(name)
        if isinstance(original, _Function) and not _is_open(method) and name != "__init__":
            additional = _parameters(original).keys() - _parameters(method).keys()
            yield from (f"{place}.{name} is called with {added!r}, which we do not take" for added in additional)
    for name, original in theirs.items():
        marks = [ast.unparse(mark) for mark in getattr(original, "decorator_list", ())]
        if is_leaf and "abstractmethod" in marks and name not in ours:
            yield f"{place}.{name} is abstract, and we do not define it"
