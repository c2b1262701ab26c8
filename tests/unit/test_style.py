"""The rules for docstrings and names that ruff does not know, checked on the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST_WORDS = {
    "also",
    "as",
    "by",
    "how",
    "if",
    "of",
    "one",
    "only",
    "that",
    "these",
    "they",
    "those",
    "what",
    "when",
    "where",
    "whether",
    "which",
    "who",
    "with",
    "without",
}
NAMES = {
    "asked",
    "at",
    "costs",
    "each",
    "every",
    "found",
    "given",
    "held",
    "here",
    "how",
    "kept",
    "known",
    "mine",
    "now",
    "other",
    "parts",
    "there",
    "wanted",
}
FOLDERS = ("hybrid_backend", "kernels", "examples")
PATHS = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield ``(line, docstring)`` of the module, its classes and functions, and of documented attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str() as text)):
                        yield statement.lineno, text


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield ``(line, name)`` of each variable, argument and attribute that the module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def first_word(docstring: str) -> str:
    return docstring.split(maxsplit=1)[0].strip("`*.,:;()").lower() if docstring.split() else ""


@pytest.mark.parametrize("path", PATHS)
def test_a_docstring_begins_with_the_thing_it_describes(path: str) -> None:
    found_lines = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for line, text in docstrings(ast.parse((ROOT / path).read_text()))
        if first_word(text) in FIRST_WORDS
    ]
    assert not found_lines, "\n".join(found_lines)


@pytest.mark.parametrize("path", PATHS)
def test_a_name_says_what_it_holds(path: str) -> None:
    found_lines = [
        f"{path}:{line}: {name}"
        for line, name in names(ast.parse((ROOT / path).read_text()))
        if name.strip("_") in NAMES
    ]
    assert not found_lines, "\n".join(found_lines)
