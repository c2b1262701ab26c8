"""Fixtures of the contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.implementations import NAMES, implementation


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=NAMES, scope="module")
def operations(request: pytest.FixtureRequest) -> Any:
    return implementation(request.param)
