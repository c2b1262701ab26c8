"""Methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.apex import Apex
from hybrid_backend.methods.base import Method
from hybrid_backend.methods.clo import Clo
from hybrid_backend.methods.dense import Dense
from hybrid_backend.methods.headinfer import HeadInfer
from hybrid_backend.methods.hgca import Hgca
from hybrid_backend.methods.infinigen import InfiniGen
from hybrid_backend.methods.scout import Scout

_METHODS: Mapping[str, type[Method]] = MappingProxyType(
    {
        "apex": Apex,
        "clo": Clo,
        "dense": Dense,
        "headinfer": HeadInfer,
        "hgca": Hgca,
        "infinigen": InfiniGen,
        "scout": Scout,
    }
)


def method_names() -> list[str]:
    return sorted(_METHODS)


def resolve_method(name: str) -> type[Method]:
    """The method called ``name`` in the YAML."""
    if name not in _METHODS:
        raise ConfigError(f"method: unknown method {name!r}; known are {', '.join(method_names())}")
    return _METHODS[name]
