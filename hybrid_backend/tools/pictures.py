"""matplotlib, which only pictures need."""

from __future__ import annotations

from importlib.util import find_spec

from hybrid_backend.errors import ConfigError


def check_matplotlib(extra: str) -> None:
    """To be asked before a long run, not after it.

    Args:
        extra: of this package, that has it.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"the pictures need matplotlib, which is not installed: pip install 'hybrid-backend[{extra}]'"
        )
