"""The C ABI of ``libhybrid_cpu.so`` for ctypes, read from its headers (``src/api.h``, ``src/api_operations.h``).

The headers are the only declaration of the ABI: structures, constants and prototypes are not written a second time.
The headers keep to what `_declarations` reads: plain structures, enumerations and prototypes.
"""

from __future__ import annotations

import ctypes
import re
from struct import Struct
from typing import Any

from hybrid_backend.kernels.cpu.build import HEADERS, interface_hash

HASH = interface_hash()
"""Hash of the headers that were read (`build.interface_hash`)."""
CONSTANTS: dict[str, int] = {}
"""Value of each enumerator, by its name."""
STRUCTURES: dict[str, type[ctypes.Structure]] = {}
"""Class of each C structure, by its name."""
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {}
"""Result type and argument types of each function, by its name."""
PACKERS: dict[str, Struct] = {}
"""Packer of the arguments of each operation, by the operation's name.

A packed string costs a fifth of what a ctypes structure costs to make, and a decode step makes ten for each layer.
"""

_TYPES = {
    "char": ctypes.c_char,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
}
_FORMATS: dict[Any, str] = {ctypes.c_void_p: "P", ctypes.c_int64: "q", ctypes.c_double: "d"}
"""Format characters of `struct` for the members of operations' arguments, which take 8 bytes each."""


def declare(library: ctypes.CDLL) -> None:
    """Give the library's functions their result and argument types.

    Raises:
        AttributeError: the library lacks a function.
    """
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def _declarations(header: str) -> None:
    """Add a header's enumerators, structures and prototypes to this module's tables."""
    text = re.sub(r"//.*|#.*", "", header)
    for body in re.findall(r"\benum\s*\{(.*?)\}", text, re.DOTALL):
        value = -1
        for enumerator in filter(str.strip, body.split(",")):
            name, _, number = enumerator.partition("=")
            value = int(number) if number else value + 1
            CONSTANTS[name.strip()] = value
    for body, name in re.findall(r"\btypedef struct \w+\s*\{(.*?)\}\s*(\w+);", text, re.DOTALL):
        fields = [field for member in body.split(";") if member.strip() for field in _members(member)]
        STRUCTURES[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    for result, name, arguments in re.findall(r"^([\w ]+[\w*])\s+(hb_\w+)\(([^)]*)\);", text, re.MULTILINE):
        types = [_argument_type(argument) for argument in arguments.split(",") if argument.strip() != "void"]
        if result == "void":
            PROTOTYPES[name] = None, types
        else:
            # A string is converted to bytes, any other address is a number.
            PROTOTYPES[name] = ctypes.c_char_p if re.fullmatch(r"const char\s*\*", result) else _type(result), types


def _members(member: str) -> list[tuple[str, Any]]:
    """Split the declaration of one or more members of a structure into their names and types."""
    words = member.replace("*", " * ").split()
    words = words[1:] if words[0] == "const" else words
    base, declarators = words[0], " ".join(words[1:]).split(",")
    return [(declarator.strip("* "), _type(f"{base} {declarator}")) for declarator in declarators]


def _type(declaration: str) -> Any:
    """Return the ctypes type of a member or a result; an address is a plain number."""
    if "*" in declaration:
        return ctypes.c_void_p
    name = declaration.replace("const ", "").split()[0]
    return _TYPES.get(name) or STRUCTURES[name]


def _argument_type(declaration: str) -> Any:
    """Return the ctypes type of an argument. ctypes checks the class of a structure that is passed by its address."""
    name, is_address = re.sub(r"\bconst\b|\*", " ", declaration).split()[0], declaration.count("*") == 1
    return ctypes.POINTER(STRUCTURES[name]) if is_address and name in STRUCTURES else _type(declaration)


def _formats(structure: type[ctypes.Structure]) -> str:
    """Return the format of `struct` for a structure of 8-byte members."""
    types = [field[1] for field in structure._fields_]
    return "".join(_formats(kind) if issubclass(kind, ctypes.Structure) else _FORMATS[kind] for kind in types)


def _operations(header: str) -> None:
    """Fill `PACKERS`, and let the operations take packed strings."""
    for name in re.findall(r"\bint (hb_\w+)\(const \w+_args\* args\);", header):
        PACKERS[name] = Struct(_formats(STRUCTURES[f"{name}_args"]))
        PROTOTYPES[name] = ctypes.c_int, [ctypes.c_char_p]


for _path in HEADERS:
    _declarations(_path.read_text())
_operations(HEADERS[1].read_text())
