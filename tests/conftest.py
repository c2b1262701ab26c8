"""Settings shared by all tests."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from hybrid_backend.hub import fetch

# Machines are shared and noisy: a slow example is not a failure.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("default")

# Where no GPU is, Triton's kernels run under its interpreter, which must be chosen before Triton is first imported. The
# processes that tests start are not to inherit it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError:
        pass  # no wheel for this platform
    else:
        triton.knobs.runtime.interpret = True
    finally:
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The demo model's folder."""
    return fetch("smollm2-135m-instruct")
