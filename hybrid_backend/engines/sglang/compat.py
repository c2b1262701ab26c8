"""Which versions of SGLang this adapter runs on. Its seams move from release to release, so the range is narrow; but a
version is refused for what it lacks, not for its number. Imports nothing of SGLang."""

from __future__ import annotations

import logging
from functools import cache

from hybrid_backend.engines.probe import Engine, Range
from hybrid_backend.engines.registry import installed_version
from hybrid_backend.engines.sglang.leans import LEANS, PLUGIN

LOCKED = "0.5.23"
"""The version that `make` installs."""
SGLANG = Engine("SGLang", "sglang", Range("0.5.23", "0.5.23"), f"pip install sglang=={LOCKED}", LEANS)
"""docs/engines.md says which tests ran on which version."""


def installed() -> str | None:
    """The version of SGLang that is installed; None: there is none."""
    return installed_version("sglang")


@cache
def missing() -> tuple[str, ...]:
    """Return in words what of SGLang is not as we know it; checked once in a process."""
    return tuple(SGLANG.missing())


def check_engine(*, warns: bool = False) -> None:
    """Refuse the installed version if need be, in every process that uses it.

    Args:
        warns: of a version that was not tested; for the process that reads the user's flags.

    Raises:
        EngineError: something that we lean on is missing.
    """
    warning = SGLANG.check(installed() or "?", missing())
    if warning is not None and warns:
        logging.getLogger(__name__).warning(warning)


def can_register() -> bool:
    """Tell whether SGLang has the plugin functions that we use. If not, log what it lacks.

    SGLang loads plugins for all users, also for those of other backends.
    """
    lacks = SGLANG.missing(PLUGIN)
    if lacks:
        logging.getLogger(__name__).error(
            "SGLang %s lacks what the hybrid backend leans on, which stays out: %s", installed(), "; ".join(lacks)
        )
    return not lacks
