"""The other kernel tests are skipped without the native library: they must not be skipped by accident."""

from __future__ import annotations

import os
import shutil

import pytest

from hybrid_backend.kernels import cpu


def test_the_native_kernels_are_there_where_a_compiler_is() -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler on this machine")
    assert cpu.available(), cpu.why_unavailable()
