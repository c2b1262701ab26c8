"""Shared by the tests of both engines: the one that is installed, and its answers without our plugin in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.engines.answers import StockAnswers, stock_answers
from tests.engines.installed import ENGINE

ROOT = Path(__file__).parents[2]
TOKENS = 16  # so that every answer begins a page


@pytest.fixture(scope="session")
def engine() -> ModuleType:
    """`tests.engines.vllm.suite` or `tests.engines.sglang.suite`."""
    return ENGINE


@pytest.fixture(scope="session")
def stock(engine: ModuleType, tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[StockAnswers]:
    with stock_answers(tmp_path_factory, engine.NAME, lambda folder: engine.stock(folder, model_dir)) as answers:
        yield answers
