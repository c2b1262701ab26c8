"""What `hybrid serve` adds to vLLM's command line on a CPU, and that whatever the user wrote stays."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hybrid_backend.engines.flags import flag_names
from hybrid_backend.errors import EngineError
from tests.engines.commands import TINY_MODELS

pytestmark = pytest.mark.engine
PRELOADED = ["LD_PRELOAD"] if platform.machine() == "x86_64" else []  # for others vLLM requires no OpenMP


def chosen(folder: Path, patch: pytest.MonkeyPatch, *flags: str, bf16: bool = False, cores: int = 2) -> Any:
    """vLLM's arguments and the lines of the log, on a CPU with or without bf16 instructions."""
    from hybrid_backend.engines.vllm import serve
    from hybrid_backend.workers.cpus import Topology

    (folder / "config.json").write_text(json.dumps(TINY_MODELS["llama"]))
    patch.setattr(serve, "has_bf16", lambda: bf16)
    patch.setattr("hybrid_backend.engines.cpu_defaults.has_bf16", lambda: bf16)
    patch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    patch.setattr(Topology, "read", classmethod(lambda cls: Topology(tuple(frozenset([n]) for n in range(64)), {})))
    arguments = serve.engine_arguments(str(folder), "tiny", "{}", 16, flags)
    parsed = serve._parse(arguments)
    return parsed, list(serve._choose_for_cpu(parsed, flag_names(arguments)))


def what(lines: list[str]) -> list[str]:
    """Each line begins with the name of what was chosen."""
    return [re.split("[=:,]", line)[0] for line in lines]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")
    for name in (*names, "LD_PRELOAD", "VLLM_USE_LAYERNAME", "VLLM_USE_AOT_COMPILE"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test is over
        monkeypatch.delenv(name)


def test_without_bf16_instructions_fp32_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, lines = chosen(tmp_path, monkeypatch)
    assert parsed.dtype == "float32" and "float32 instead of bfloat16" in lines[0]
    parsed, _ = chosen(tmp_path, monkeypatch, bf16=True)
    assert parsed.dtype == "auto"


def test_readings_of_the_metrics_are_not_logged_unless_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, _ = chosen(tmp_path, monkeypatch, bf16=True)
    assert parsed.disable_access_log_for_endpoints == "/metrics"
    parsed, _ = chosen(tmp_path, monkeypatch, "--disable-access-log-for-endpoints", "/health", bf16=True)
    assert parsed.disable_access_log_for_endpoints == "/health"


def test_a_small_machine_computes_on_all_cores_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, lines = chosen(tmp_path, monkeypatch, bf16=True)
    assert parsed.enforce_eager and os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert what(lines) == ["VLLM_CPU_OMP_THREADS_BIND", *PRELOADED, "--enforce-eager"]
    assert "VLLM_USE_LAYERNAME" not in os.environ


def test_a_server_of_many_cores_keeps_vllms_binding_and_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, lines = chosen(tmp_path, monkeypatch, bf16=True, cores=32)
    assert not parsed.enforce_eager and what(lines) == [*PRELOADED, "cpp_wrapper", "VLLM_USE_AOT_COMPILE"]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ


def test_compiled_code_calls_operators_without_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, lines = chosen(tmp_path, monkeypatch, "--no-enforce-eager", bf16=True)
    assert parsed.compilation_config.inductor_compile_config["cpp_wrapper"] is True
    assert os.environ["VLLM_USE_LAYERNAME"] == os.environ["VLLM_USE_AOT_COMPILE"] == "0"
    (way_back,) = [line.partition("with it: ")[2] for line in lines if "cpp_wrapper" in line]
    parsed, lines = chosen(tmp_path, monkeypatch, "--no-enforce-eager", *shlex.split(way_back), bf16=True)
    assert parsed.compilation_config.inductor_compile_config["cpp_wrapper"] is False
    assert not any("cpp_wrapper" in line for line in lines)


def test_intels_openmp_of_vllms_wheel_is_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/of/mine.so")
    _, lines = chosen(tmp_path, monkeypatch, bf16=True)
    if PRELOADED:
        intels, mine = os.environ["LD_PRELOAD"].split(":")
        assert Path(intels).name == "libiomp5.so" and Path(intels).is_file() and mine == "/lib/of/mine.so"
        assert any("Intel's OpenMP" in line for line in lines)


def test_a_users_own_flags_always_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": "1",
        "LD_PRELOAD": "/lib/libgomp.so.1",
        "VLLM_USE_LAYERNAME": "1",
        "VLLM_USE_AOT_COMPILE": "1",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    parsed, lines = chosen(tmp_path, monkeypatch, "--dtype", "bfloat16", "--no-enforce-eager")
    assert parsed.dtype == "bfloat16" and not parsed.enforce_eager and not lines
    assert "cpp_wrapper" not in parsed.compilation_config.inductor_compile_config
    assert {name: os.environ[name] for name in own} == own


def test_flags_in_a_file_win_over_ours_and_those_beside_it_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_backend.engines.vllm import serve

    file = tmp_path / "engine.yaml"
    file.write_text(
        "served-model-name: mine\nport: 1\nhost: 0.0.0.0\nenforce-eager: false\nadditional-config: {a: 1}\n"
    )
    for words in (["--config", str(file)], [f"--config={file}"]):
        flags = serve._with_flags_of_file([*words, "--port", "2"])
        parsed, _ = chosen(tmp_path, monkeypatch, *flags, bf16=True)
        assert parsed.served_model_name == ["mine"] and parsed.host == "0.0.0.0"
        assert parsed.port == 2 and parsed.additional_config == {"a": 1}
        assert not parsed.enforce_eager
    parsed, _ = chosen(tmp_path, monkeypatch, bf16=True)
    assert parsed.served_model_name == ["tiny"] and parsed.host == "127.0.0.1" and parsed.shutdown_timeout == 30


@pytest.mark.parametrize("text", ["port: [", "- port", "7"])
def test_a_file_of_flags_that_cannot_be_read_is_refused_by_name(tmp_path: Path, text: str) -> None:
    from hybrid_backend.engines.vllm import serve

    file = tmp_path / "engine.yaml"
    file.write_text(text)
    with pytest.raises(EngineError, match=f"--config: vLLM cannot read {file}: "):
        serve._with_flags_of_file(["--config", str(file)])
    file.write_text("model: another/one")
    with pytest.raises(EngineError, match=f"--config: {file} names a model; leave it out"):
        serve._with_flags_of_file(["--config", str(file)])
    with pytest.raises(EngineError, match="--config: expected one file"):
        serve._with_flags_of_file(["--config"])


@pytest.fixture(scope="module")
def app() -> TestClient:
    """vLLM's own server behind our defaults, without an engine: only what is refused before it is asked has answers."""
    from vllm.entrypoints.launchers.app import build_app

    from hybrid_backend.engines.vllm import serve

    parsed = serve._parse(["--model", "any", "--api-key", "secret"])
    server = build_app(parsed, ("generate",))
    server.state.args = parsed
    return TestClient(server, raise_server_exceptions=False)


@pytest.mark.parametrize("asked", [{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]}])
@pytest.mark.parametrize("budget", [True, "many", [512]])
def test_a_wrong_budget_of_a_streamed_request_is_a_bad_request(app: TestClient, asked: Any, budget: object) -> None:
    path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
    body = {"model": "any", "stream": True, "vllm_xargs": {"budget_tokens": budget}, **asked}
    answer = app.post(path, json=body, headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == 400 and error["message"].startswith("budget_tokens: got "), error
    assert app.post(path, json=body).status_code == 401, "strangers are told nothing"
