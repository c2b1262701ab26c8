"""A check whether an installed engine still has what an adapter leans on. It reads sources and imports nothing.

An import would be slow, has effects (vLLM's CPU worker changes torch.cuda), and needs the engine's device. Each adapter
has a table of `Lean`; `missing` says in words which of them do not hold.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from hybrid_backend.errors import EngineError

_DEPTH = 6  # of imports and base classes that are followed
_Node = TypeVar("_Node", ast.ClassDef, ast.FunctionDef)


@dataclass(frozen=True)
class Lean:
    """A symbol of an engine that the adapter leans on. Fields that are left out are not checked."""

    symbol: str
    """``module``, ``module:name`` or ``module:Class.method``; several with `` | `` between where versions moved it."""
    use: str
    """Purpose in a few words, which an error quotes."""
    has: tuple[str, ...] = ()
    """Fields, attributes, methods, enum members of a class; ``name: type`` where it must be declared as just that
    (types with `` | `` between)."""
    passes: tuple[str, ...] | None = None
    """Parameters that we give: they must exist, and no other may be needed."""
    takes: tuple[str, ...] | None = None
    """Parameters of our override: the engine's own may have no other."""
    defines: tuple[str, ...] | None = None
    """Methods that our subclass defines: no other may be abstract."""
    reads: tuple[str, ...] = ()
    """Pieces of its source text, where we depend on how it is written."""


@dataclass(frozen=True)
class Range:
    """Versions that were tested, by as many of their numbers as are written: ``0.33`` is every release of 0.33."""

    lowest: str
    highest: str

    def __str__(self) -> str:
        return self.lowest if self.lowest == self.highest else f"{self.lowest} to {self.highest}"

    def warning(self, engine: str, version: str) -> str | None:
        """Return the warning about a version that was not tested; None if it was."""
        older = _numbers(version, self.lowest) < _numbers(self.lowest)
        newer = _numbers(version, self.highest) > _numbers(self.highest)
        if not older and not newer:
            return None
        return f"{engine} {version} is {'older' if older else 'newer'} than what was tested ({self})"


def _numbers(version: str, like: str = "") -> list[int]:
    """The numbers of a version, without what follows them; as many as ``like`` has."""
    numbers = [int(each) for each in re.split(r"[^\d.]", version)[0].split(".") if each]
    return numbers[: len(like.split("."))] if like else numbers


@dataclass(frozen=True)
class Engine:
    """An engine as its adapter knows it. ``package``: as it is imported; ``fix``: how to get a known version."""

    name: str
    package: str
    tested: Range
    fix: str
    leans: tuple[Lean, ...]

    def missing(self, leans: Iterable[Lean] | None = None) -> list[str]:
        """Return in words which of ``leans``, by default all, do not hold. The engine is not imported."""
        return missing(self.package, self.leans if leans is None else leans)

    def check(self, version: str, lacks: Sequence[str]) -> str | None:
        """Check that a version can be used. ``lacks``: the result of `missing`.

        Returns:
            what to warn of: all is there, but the version is not one that was tested.

        Raises:
            EngineError: something that we lean on is missing.
        """
        if lacks:
            raise EngineError(
                f"{self.name} {version} lacks what the hybrid backend leans on: {'; '.join(lacks)}. "
                f"Tested: {self.tested}; {self.fix}, in an environment of its own"
            )
        return self.tested.warning(self.name, version)


@dataclass(frozen=True)
class Definition:
    """A class or function at the top of a module, by its source; without source: a value, or a whole module."""

    module: str
    source: str = ""

    @property
    def is_class(self) -> bool:
        return self.source.startswith("class ")


class Sources:
    """The sources of a package, each file read once.

    Parsing what an adapter leans on would take a second. So definitions are cut out of the text by their indentation,
    and nothing is parsed but the first line of a class and the parameters of a function.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: which holds the package."""
        self._folder = folder
        self._texts: dict[str, str | None] = {}
        self._found: dict[tuple[str, str], Definition | None] = {}

    def text(self, module: str) -> str | None:
        if module not in self._texts:
            base = self._folder.joinpath(*module.split("."))
            file = next((each for each in (base.with_suffix(".py"), base / "__init__.py") if each.is_file()), None)
            self._texts[module] = None if file is None else "\n" + file.read_text(errors="replace")
        return self._texts[module]

    def find(self, module: str, name: str, depth: int = _DEPTH) -> Definition | None:
        """A definition in a module, or where the module imports it from; None: there is none."""
        key = (module, name)
        if key not in self._found:
            self._found[key] = self._look(module, name, depth)
        return self._found[key]

    def family(self, definition: Definition, depth: int = _DEPTH) -> Iterator[Definition]:
        """A class and those it derives from, as far as they are of this package."""
        if not definition.is_class or depth == 0:
            return
        yield definition
        for base in _parsed(definition.source, ast.ClassDef).bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            parent = self.find(definition.module, named.id) if isinstance(named, ast.Name) else None
            if parent is not None:
                yield from self.family(parent, depth - 1)

    def _look(self, module: str, name: str, depth: int) -> Definition | None:
        text = self.text(module)
        if text is None or depth == 0:
            return None
        source = _cut(text, name, "", "class ", "def ", "async def ")
        if source:
            return Definition(module, source)
        for origin, original in self._imported(module, text, name):
            if self.text(f"{origin}.{original}") is not None:
                return Definition(f"{origin}.{original}")
            found = self.find(origin, original, depth - 1)
            if found is not None:
                return found
        value = re.search(rf"\n {{0,4}}{re.escape(name)}\s*[:=]", text)
        return None if value is None else Definition(module)

    def _imported(self, module: str, text: str, name: str) -> Iterator[tuple[str, str]]:
        """``(module, name)`` from which a module has a name: where imports name it, else where stars may bring it."""
        stars = []
        for found in re.finditer(r"\n *from +(\S+) +import +(\([^)]*\)|.+)", text):
            origin = self._absolute(module, found[1])
            listed = re.sub(r"#.*", "", found[2]).strip("() \n")
            if listed == "*":
                stars.append(origin)
            for item in listed.split(","):
                original, _, alias = item.strip().partition(" as ")
                if (alias.strip() or original) == name:
                    yield origin, original.strip()
        for origin in stars:
            yield origin, name

    def _absolute(self, module: str, origin: str) -> str:
        dots = len(origin) - len(origin.lstrip("."))
        if not dots:
            return origin
        is_package = (self._folder.joinpath(*module.split(".")) / "__init__.py").is_file()
        parts = module.split(".")[: len(module.split(".")) - dots + is_package]
        return ".".join([*parts, *filter(None, [origin[dots:]])])


def missing(package: str, leans: Iterable[Lean], folder: Path | None = None) -> list[str]:
    """Return in words which of ``leans`` do not hold, each with its use.

    Args:
        package: the engine's, which is not imported.
        folder: which holds the package; None: where Python would import it from.
    """
    folder = folder or folder_of(package)
    if folder is None:
        return [f"{package}: it cannot be imported"]
    sources = Sources(folder)
    return [f"{what} ({lean.use})" for lean in leans for what in _lacks(sources, lean)]


def folder_of(package: str) -> Path | None:
    """The folder from which Python would import a package; None: there is none."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def _lacks(sources: Sources, lean: Lean) -> list[str]:
    """Return what is wrong at the first place of the symbol; nothing if one of its places has all."""
    found = [list(_lacks_at(sources, place, lean)) for place in lean.symbol.split(" | ")]
    return [] if [] in found else found[0]


def _lacks_at(sources: Sources, place: str, lean: Lean) -> Iterator[str]:
    module, _, qualified = place.partition(":")
    name, _, method = qualified.partition(".")
    text = sources.text(module)
    definition = sources.find(module, name) if name else Definition(module, text or "")
    if text is None or definition is None:
        yield f"no module {module}" if text is None else f"no {place}"
        return
    family = list(sources.family(definition))
    source = definition.source
    if method:
        source = _method(family, method)
        if not source:
            yield f"no {place}"
            return
    yield from (f"{place} is written otherwise: {each!r} is not in it" for each in lean.reads if each not in source)
    for member in lean.has:
        yield from _lacks_member(place, member, family)
    if lean.defines is not None:
        more = [each for each in _abstract(family) if each not in lean.defines]
        yield from (f"{place}.{each} is abstract, and our subclass does not define it" for each in more)
    if lean.passes is None and lean.takes is None:
        return
    called = source if method or not definition.is_class else _method(family, "__init__")
    function = _parsed(called, ast.FunctionDef) if called else _parsed("def nothing():", ast.FunctionDef)
    names, needed = _parameters(function)
    if lean.passes is not None:
        is_open = function.args.kwarg is not None or function.args.vararg is not None
        yield from (f"{place} takes no {each!r}" for each in lean.passes if each not in names and not is_open)
        yield from (f"{place} needs {each!r}, which we do not pass" for each in needed if each not in lean.passes)
    if lean.takes is not None:
        more = [each for each in names if each not in lean.takes]
        yield from (f"{place} is called with {each!r}, which our override does not take" for each in more)


def _cut(text: str, name: str, indent: str, *kinds: str) -> str:
    """The source of the last definition of that name (before it are overloads) with that indentation; empty: none."""
    for kind in kinds:
        if f"\n{indent}{kind}{name}" not in text:  # which is quicker than to look from the end
            continue
        for follows in ("(", ":", "["):
            first = text.rfind(f"\n{indent}{kind}{name}{follows}")
            if first < 0:
                continue
            block = text[first + 1 :]
            for end in re.finditer(rf"\n {{0,{len(indent)}}}[^\s#)\]}}]", block):
                if block.count('"""', 0, end.start()) % 2 == 0:  # else it is a line of a long string
                    block = block[: end.start()]
                    break
            return block.replace(f"\n{indent}", "\n").removeprefix(indent)
    return ""


def _parsed(source: str, kind: type[_Node]) -> _Node:
    """The head of a definition, up to the colon that ends it, with an empty body."""
    for end in re.finditer(r":[ \t]*(#.*)?(?=\n|$)", source):
        try:
            node = ast.parse(source[: end.start()].removeprefix("async ") + ": ...").body[0]
        except SyntaxError:
            continue  # a colon inside
        if isinstance(node, kind):
            return node
    # On one line with its body.
    node = ast.parse(source.removeprefix("async ")).body[0]
    assert isinstance(node, kind)
    return node


def _method(family: Sequence[Definition], name: str) -> str:
    """Its source, without indentation; empty: nothing in the family defines it."""
    found = (_cut(each.source, name, "    ", "def ", "async def ") for each in family)
    return next((source for source in found if source), "")


def _lacks_member(place: str, member: str, family: Sequence[Definition]) -> Iterator[str]:
    name, _, types = member.partition(": ")
    word = re.escape(name)
    for each in family:
        if name not in each.source:
            continue
        declared = re.search(rf"\n    {word}\s*:\s*([^=\n]+)", each.source)
        declared = declared or re.search(rf"self\.{word}\s*:\s*([^=\n]+)", each.source)
        is_there = declared or re.search(
            rf"\n    (?:async )?def {word}\(|\n    {word}\s*=|self\.{word}\s*=[^=]", each.source
        )
        if is_there:
            found = declared[1].strip() if declared else "of no declared type"
            if types and found not in types.split(" | "):
                yield f"{place}.{name} is {found}, not {types.replace(' | ', ' or ')}"
            return
    yield f"no {place}.{name}"


def _parameters(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """Names of all parameters but self and cls, and those of them without a default."""
    spec = function.args
    ordered = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    needed = ordered[: len(ordered) - len(spec.defaults)]
    needed += [each.arg for each, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value is None]
    names = [*ordered, *(each.arg for each in spec.kwonlyargs)]
    mine = {"self", "cls"} & set(ordered[:1])
    return [each for each in names if each not in mine], [each for each in needed if each not in mine]


def _abstract(family: Sequence[Definition]) -> list[str]:
    """Abstract methods that no class before them defines."""
    found: dict[str, bool] = {}
    for each in family:
        for match in re.finditer(r"((?:\n    @.*)*)\n    (?:async )?def (\w+)\(", each.source):
            found.setdefault(match[2], "abstractmethod" in match[1])
    return [name for name, is_abstract in found.items() if is_abstract]
