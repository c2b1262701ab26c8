"""Versions of SGLang that this adapter runs on. Nothing of SGLang is imported.

SGLang's seams move from release to release, so the tested range is narrow. A version is refused for what it lacks,
not for its number.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hybrid_backend.engines.registry import installed_version
from hybrid_backend.engines.sglang.upstream import PLUGIN, SYMBOLS
from hybrid_backend.engines.upstream import Engine, Range

LOCKED = "0.5.23"
"""Version of SGLang that `make` installs."""
SGLANG = Engine(
    "SGLang",
    "sglang",
    LOCKED,
    Range("0.5.22", "0.5.23"),
    f"pip install sglang=={LOCKED}",
    SYMBOLS,
    Path(__file__).parent,
)
"""The engine; docs/reference/versions.md says which tests ran on which version."""
PARTLY = ("0.5.22",)
"""Versions of that range with which some tests have not run to the end."""


def installed() -> str | None:
    """Return the version of SGLang that is installed; None if there is none."""
    return installed_version("sglang")


def check_engine(*, warns: bool = False) -> None:
    """Refuse the installed version of SGLang if it lacks something that the adapter uses.

    Args:
        warns: also warn of a version that was not tested.

    Raises:
        EngineError: something that the adapter uses is missing.
    """
    warning = SGLANG.check_installed(installed())
    if warning is not None and warns:
        logging.getLogger(__name__).warning(warning)


def can_register() -> bool:
    """Tell whether SGLang has the plugin functions that we use (`Engine.can_register`)."""
    return SGLANG.can_register(PLUGIN, installed(), logging.getLogger(__name__))
