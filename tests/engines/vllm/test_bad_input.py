"""What vLLM refuses when it is started without `hybrid serve`, and what a user of `hybrid serve` sees."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hybrid_backend.config import HybridConfig, find_config, load_config
from hybrid_backend.engines.vllm import BACKEND, CPU_WORKER
from tests.engines.commands import Answer, run_command, run_jobs, write_models
from tests.engines.server import MODEL, free_port

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def answers(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Command lines of vLLM itself, in one process."""
    bare = ["--model", models[MODEL], "--attention-backend", BACKEND]
    by_our_name = ["--model", models[MODEL], "--attention-backend", "hybrid"]
    file = tmp_path_factory.mktemp("config") / "hybrid.yaml"
    file.write_text("budget_tokens: 512\nmethod: dense\n")
    settings = json.dumps({"hybrid": str(file), "another": "plugin"})
    waits = json.dumps({"hybrid": {"method": "apex", "apex": {"device_tokens": 96}}})
    jobs = {
        "LoRA": {"engine": [*bare, "--enable-lora", "--additional-config", waits]},
        "bare": {"engine": bare},
        "our name": {"engine": by_our_name},
        "our worker": {"engine": [*bare, "--worker-cls", CPU_WORKER]},
        "file": {"engine": [*bare, "--additional-config", settings]},
    }
    return run_jobs(jobs, tmp_path_factory.mktemp("tmp"))


@pytest.mark.parametrize("flags", ["bare", "our name", "our worker"])
def test_vllm_alone_needs_one_flag_and_finds_the_model_s_configuration(answers: dict[str, Answer], flags: str) -> None:
    answer = answers[flags]
    assert answer.code == 0 and not answer.remains, answer.output
    assert answer.config is not None
    config = HybridConfig.model_validate({**answer.config, "exact_layers": tuple(answer.config["exact_layers"])})
    shipped = load_config(find_config("smollm2-135m-instruct"))
    assert (shipped.method, config.method) == ("auto", "quest")
    assert config == shipped.model_copy(update={"method": "quest"})


def test_vllm_alone_reads_the_configuration_that_additional_config_names(answers: dict[str, Answer]) -> None:
    answer = answers["file"]
    assert answer.code == 0, answer.output
    assert answer.config is not None
    assert (answer.config["budget_tokens"], answer.config["method"]) == (512, "dense")


def test_where_rows_cannot_wait_apex_goes_on_in_lockstep_and_says_why(answers: dict[str, Answer]) -> None:
    answer = answers["LoRA"]
    assert answer.code == 0, answer.output
    assert "(lockstep), as overlap does not work with LoRA; leave out --enable-lora for it" in answer.output


# -- as a user sees it: one process each ---------------------------------------------------------------------


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_hybrid_serve_refuses_a_page_size_unlike_the_engine_s(tmp_path: Path) -> None:
    port = str(free_port())
    answer = run_command(["hybrid", "serve", MODEL, "--", "--port", port, "--block-size", "64"], tmp_path)
    answer.check_refusal("page_size: 16", "--block-size 16")


def test_hybrid_serve_refuses_a_busy_port(tmp_path: Path, busy_port: int) -> None:
    answer = run_command(["hybrid", "serve", MODEL, "--", "--port", str(busy_port)], tmp_path)
    answer.check_refusal(f"--port: {busy_port} is already in use")
    assert answer.output.count("\n") == 1


def test_hybrid_serve_refuses_an_unknown_key_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.yaml"
    file.write_text(yaml.safe_dump({"budget_token": 1024}))
    answer = run_command(["hybrid", "serve", MODEL, "--config", str(file)], tmp_path)
    answer.check_refusal("hybrid.yaml", "'budget_token'", "did you mean budget_tokens?")
    assert answer.output.count("\n") == 1
