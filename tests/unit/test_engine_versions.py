"""What a version that was not tested meets at start: one warning, or a refusal; stock vLLM is left alone."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hybrid_backend.engines.sglang import compat as sglang
from hybrid_backend.engines.sglang import plugin as sglang_plugin
from hybrid_backend.engines.upstream import Engine
from hybrid_backend.engines.vllm import compat, plugin
from hybrid_backend.errors import EngineError

LACKS = ["no vllm.platforms:cpu_platform_plugin (finds the CPU platform)"]


def pretend(monkeypatch: pytest.MonkeyPatch, version: str, lacks: list[str]) -> list[str]:
    """An engine of that version, which lacks that; returns the warnings that it gets."""
    warnings: list[str] = []
    engine, logger = ModuleType("vllm"), ModuleType("vllm.logger")
    vars(engine)["__version__"] = version
    vars(logger)["init_logger"] = lambda name: SimpleNamespace(warning=warnings.append)
    monkeypatch.setitem(sys.modules, "vllm", engine)
    monkeypatch.setitem(sys.modules, "vllm.logger", logger)
    monkeypatch.setattr(compat, "installed_version", lambda package: version)
    monkeypatch.setattr(sglang, "installed_version", lambda package: version)
    monkeypatch.setattr(Engine, "missing", lambda *_: lacks)
    return warnings


def test_a_newer_version_that_has_all_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes its configuration anew in every process and asks the platform again."""
    warnings = pretend(monkeypatch, "0.99.0", [])
    config: Any = SimpleNamespace(additional_config={"hybrid": {}})
    for _ in range(3):
        compat.check_engine(config)
    assert warnings == ["vLLM 0.99.0 is newer than what was tested (0.31 to 0.33)"]
    assert config.additional_config["hybrid"] == {}


def test_a_tested_version_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = pretend(monkeypatch, "0.31.0", [])
    config: Any = SimpleNamespace(additional_config={})
    compat.check_engine(config)
    assert warnings == []


def test_a_version_that_lacks_something_is_refused_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compat.LOCKED, LACKS)
    config: Any = SimpleNamespace(additional_config={})
    with pytest.raises(EngineError, match="hybrid backend uses: no vllm"):
        compat.check_engine(config)
    with pytest.raises(EngineError, match=r"install sglang=="):
        sglang.check_engine()


def test_sglang_warns_in_the_process_that_reads_the_flags(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, "0.9.0", [])
    sglang.check_engine()
    assert not caplog.messages
    sglang.check_engine(warns=True)
    assert caplog.messages == [f"SGLang 0.9.0 is newer than what was tested ({sglang.SGLANG.tested})"]


def test_an_engine_without_our_seams_goes_on_without_the_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines load plugins for everybody: who does not ask for our backend must not be refused."""
    pretend(monkeypatch, "0.99.0", LACKS)
    with caplog.at_level(logging.ERROR):
        plugin.register()
        assert plugin.detect() is None
        sglang_plugin.register()
    assert len(caplog.messages) == 3
    assert all("which stays out" in message and LACKS[0] in message for message in caplog.messages)


@pytest.mark.parametrize("given_up", [set(), {}])
def test_requests_end_with_an_error_in_versions_before_and_after_033(given_up: set[str] | dict[str, Any]) -> None:
    scheduler: Any = SimpleNamespace(grammar_compile_error_reqs=given_up)
    compat.end_with_error(scheduler, ["a", "b"])
    assert set(given_up) == {"a", "b"}
