"""Settings shared by all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from hybrid_backend.engines.address import reach_this_machine_directly
from tests.support.interpreter import interpret_triton
from tests.support.opened import close_all


def keep_to_own_cores() -> None:
    """Test processes divide the cores, also among what they start: servers that share cores wait for each other."""
    index, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:], os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    if mine := sorted(os.sched_getaffinity(0))[int(index) :: int(count)]:
        os.sched_setaffinity(0, mine)


reach_this_machine_directly(os.environ)  # a proxy leads to none of the servers that tests start
os.environ.pop("HYBRID_CONFIG", None)  # the user's, which servers of tests would get too
keep_to_own_cores()  # before torch counts them

# Machines are shared and noisy: a slow example is not a failure.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("default")

interpret_triton()


class ByServer(LoadFileScheduling):
    """``--dist loadfile``, but a file that starts a server for each parameter is divided by parameter."""

    FILES = ("test_exact.py", "test_methods.py")

    def _split_scope(self, nodeid: str) -> str:
        file, test = nodeid.split("::", 1)
        return f"{file}[{test.partition('[')[2]}" if file.endswith(self.FILES) else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test of all first, so that no process is left alone with it."""
    items.sort(key=lambda item: item.path.name != "test_triton_compile.py")


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByServer | None:
    # Not --dist loadgroup, whose groups pytest-xdist 3.8 loses with pytest 9.2 (pytest-xdist issue 1386).
    return ByServer(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    """Close the engines that a test has started and left open."""
    yield
    close_all()


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The demo model's folder."""
    from hybrid_backend.tools.hub import fetch

    return fetch("smollm2-135m-instruct")
