"""The device that is not the host (far_device.py), once per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.support.far_device import build_guard

    if not torch.cuda.is_available():
        build_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def device(guard: None) -> Iterator[torch.device]:
    from tests.support.far_device import far_device

    if torch.cuda.is_available():
        pytest.skip("a real device is there: tests/engines/vllm/test_gpu.py")
    with far_device() as device:
        yield device
