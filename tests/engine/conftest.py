"""Shared by the engine tests: the demo model, and answers of the stock engine, each server started once a session."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybrid_backend.hub import fetch
from tests.engine.server import MODEL, Server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return fetch(MODEL)


@pytest.fixture(scope="session", autouse=True)
def _importable_bench() -> Iterator[None]:
    """Servers import `bench.teacher` from the root of the repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


def all_at_once(server: Server, prompts: list[str], tokens: int, at_once: int = 4) -> list[str]:
    """Greedy completions, ``at_once`` requests in flight."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: server.complete(prompt, tokens), prompts))
