"""The device that is not the host: a GPU, or what stands in for one (far_device.py), once per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.gpu import DEVICE, ON_GPU
from tests.support.opened import close_all
from tests.support.streams import STREAMS


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.support.far_guard import build_guard

    if not ON_GPU:
        build_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def device(guard: None) -> Iterator[torch.device]:
    from tests.support.far_device import far_device

    if ON_GPU:
        with torch.no_grad():
            yield DEVICE
            close_all()
        return
    STREAMS.variants.clear()  # A variant that an earlier test launched must not look compiled to this test.
    with far_device() as device:
        yield device
        close_all()  # before the device is gone
