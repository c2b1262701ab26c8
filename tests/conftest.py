"""Settings shared by all tests."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hybrid_backend.hub import fetch
from tests.interpreter import interpret_triton

# Machines are shared and noisy: a slow example is not a failure.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("default")

interpret_triton()


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The demo model's folder."""
    return fetch("smollm2-135m-instruct")
