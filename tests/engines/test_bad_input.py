"""Bad input is refused before anything runs: one line says why and what to do, and nothing stays behind."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from tests.engines.commands import TINY_MODELS, Answer, run_jobs, write_models
from tests.engines.installed import ENGINE
from tests.engines.server import MODEL, free_port

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, engine: ModuleType) -> dict[str, Answer]:
    """Every refusal of the engine's table, and its help, in one process."""
    models, port = write_models(tmp_path_factory.mktemp("models")), str(free_port())
    jobs: dict[str, dict[str, Any]] = {}
    for name, (model, options, flags, _) in engine.REFUSED.items():
        model = models[model] if model in TINY_MODELS else model
        jobs[name] = {"command": ["serve", model, "--engine", engine.NAME, *options, "--", "--port", port, *flags]}
        jobs[name]["environment"] = engine.ENVIRONMENT.get(name, {})
    jobs["help"] = {"command": ["serve", MODEL, "--engine", engine.NAME, "--", "--port", port, engine.HELP[0]]}
    return run_jobs(jobs, tmp_path_factory.mktemp("tmp"))


@pytest.mark.parametrize("promise", ENGINE.REFUSED)
def test_is_refused_in_one_line(answers: dict[str, Answer], promise: str) -> None:
    _, options, flags, words = ENGINE.REFUSED[promise]
    answers[promise].check_refusal(*words)
    # A user can leave out only what the user has typed.
    (line,) = answers[promise].errors
    assert set(re.findall(r"leave out (--[\w-]+)", line)) <= {flag.partition("=")[0] for flag in (*options, *flags)}, (
        line
    )


def test_the_engine_s_own_help_is_shown(answers: dict[str, Answer], engine: ModuleType) -> None:
    assert answers["help"].code == 0 and engine.HELP[1] in answers["help"].output, answers["help"].output
