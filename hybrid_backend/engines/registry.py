"""Engines by the names that `hybrid serve --engine` takes. An engine is imported when it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.address import ServerAddress
from hybrid_backend.errors import ConfigError

_MODULES: Mapping[str, str] = MappingProxyType(
    {"vllm": "hybrid_backend.engines.vllm.serve", "sglang": "hybrid_backend.engines.sglang.serve"}
)


class Server(Protocol):
    """Functions of an adapter's ``serve`` module. Every mistake of the user is an EngineError or ConfigError."""

    NAME: str

    def check_installation(self) -> None:
        """Raise EngineError unless a supported engine is installed, before it is imported."""

    def take_address(self, extra: Sequence[str]) -> ServerAddress:
        """Take the address that the engine flags ``extra`` name. Raise EngineError if it cannot be used."""

    def run(
        self, model: str | Path, served_as: str, config: HybridConfig, extra: Sequence[str], address: ServerAddress
    ) -> None:
        """Serve ``model`` on ``address`` until stopped; the engine flags ``extra`` come last and win."""


def resolve_server(name: str) -> Server:
    """Return the ``serve`` module of an engine.

    Raises:
        ConfigError: no engine has this name.
    """
    if name not in _MODULES:
        raise ConfigError(f"--engine: got {name!r}, expected one of {', '.join(_MODULES)}")
    return cast(Server, importlib.import_module(_MODULES[name]))


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
