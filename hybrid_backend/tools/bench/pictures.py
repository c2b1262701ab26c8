"""matplotlib, which only pictures need."""

from __future__ import annotations

from importlib.util import find_spec

from hybrid_backend.errors import ConfigError


def check_matplotlib() -> None:
    """To be asked before a long run, not after it.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("the pictures need matplotlib, which is not installed: pip install 'hybrid-backend[bench]'")
