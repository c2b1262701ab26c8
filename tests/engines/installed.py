"""The engine that is installed where the tests run; each has an environment of its own."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

# Both modules define the same names, which the tests in this folder use.
ENGINE = import_module(f"tests.engines.{'sglang' if find_spec('sglang') and not find_spec('vllm') else 'vllm'}.suite")


def only(name: str, why: str) -> pytest.MarkDecorator:
    """A promise that one engine alone makes, on a server of the common tests."""
    return pytest.mark.skipif(name != ENGINE.NAME, reason=f"{name} alone: {why}")
