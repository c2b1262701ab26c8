"""Settings shared by all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.interpreter import interpret_triton


def keep_to_own_cores() -> None:
    """Test processes divide the cores, also among what they start: servers that share cores wait for each other."""
    index, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:], os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    if mine := sorted(os.sched_getaffinity(0))[int(index) :: int(count)]:
        os.sched_setaffinity(0, mine)


keep_to_own_cores()  # before torch counts them

# Machines are shared and noisy: a slow example is not a failure.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("default")

interpret_triton()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For ``--dist loadgroup``: tests that share a server stay in one process: a file's, or those of one method."""
    for item in items:
        if item.get_closest_marker("engine"):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            method = parameters.get("served", "")
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}.{item.path.stem}.{method}"))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The demo model's folder."""
    from hybrid_backend.hub import fetch

    return fetch("smollm2-135m-instruct")
