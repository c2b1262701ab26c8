"""The engine that is installed has what its adapter uses, and the check of that sees what the adapter imports."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.upstream import Engine
from hybrid_backend.engines.vllm.compat import VLLM

pytestmark = pytest.mark.engine


@pytest.fixture
def known(engine: ModuleType) -> Engine:
    return VLLM if engine.NAME == "vllm" else SGLANG


def test_the_installed_version_has_all_that_we_use(known: Engine) -> None:
    assert known.missing() == []


def test_a_symbol_that_an_adapter_would_use_and_the_engine_lacks_is_named(known: Engine, tmp_path: Path) -> None:
    """The real sources of the engine, which reach most symbols by re-exports and base classes."""
    base = {"vllm": "v1.attention.backend", "sglang": "srt.layers.attention.base_attn_backend"}[known.package]
    (tmp_path / "ours.py").write_text(
        f"from {known.package}.{base} import AttentionBackend, NoSuchName\nclass Ours(AttentionBackend):\n    pass\n"
    )
    named = replace(known, adapter=tmp_path, symbols={"use": {f"{known.package}.{base}:AttentionBackend": "no_such"}})
    problems = named.missing()
    assert f"no {known.package}.{base}:NoSuchName (ours.py)" in problems
    assert f"no {known.package}.{base}:AttentionBackend.no_such (use)" in problems
    if known.package == "vllm":  # SGLang's base class declares no method abstract.
        assert any("is abstract" in problem for problem in problems)


def test_a_start_with_the_locked_version_spends_no_time_on_the_check(known: Engine) -> None:
    """The first test of this file has shown what the check would show. A local part names a build, not a version."""
    before = time.process_time()
    assert replace(known, symbols={"use": {f"{known.package}:no_such": ""}}).missing(f"{known.locked}+cpu") == []
    assert time.process_time() - before < 0.01


def test_a_start_with_another_version_reads_the_engine(known: Engine) -> None:
    lacking = replace(known, adapter=None, symbols={"use": {f"{known.package}:no_such": ""}})
    assert lacking.missing(f"{known.locked}rc1") == [f"no {known.package}:no_such (use)"]
