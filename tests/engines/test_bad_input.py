"""Bad input is refused before anything runs: one line says why and what to do, and nothing stays behind."""

from __future__ import annotations

import re
import shlex
from types import ModuleType
from typing import Any

import pytest

from tests.engines.commands import Answer, run_jobs, write_models
from tests.engines.installed import ENGINE
from tests.engines.refused import REFUSED
from tests.engines.server import MODEL, free_port

pytestmark = pytest.mark.engine
ROWS = {promise: row for promise, row in REFUSED.items() if row.of(ENGINE.NAME)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, engine: ModuleType) -> dict[str, Answer]:
    """Every refusal of the engine's column, and its help, in one process."""
    models, port = write_models(tmp_path_factory.mktemp("models")), str(free_port())
    jobs: dict[str, dict[str, Any]] = {}

    def serve(model: str, options: str, flags: str) -> list[str]:
        command = ["serve", models.get(model, model) if model != MODEL else model, "--engine", engine.NAME]
        return [*command, *shlex.split(options), "--", "--port", port, *shlex.split(flags)]

    for promise, row in ROWS.items():
        command = serve(row.model, row.options, row.of(engine.NAME)[0])
        jobs[promise] = {"command": command, "environment": dict(row.environment)}
    jobs["help"] = {"command": serve(MODEL, "", engine.HELP[0])}
    return run_jobs(jobs, tmp_path_factory.mktemp("tmp"))


@pytest.mark.parametrize("promise", ROWS)
def test_is_refused_in_one_line(answers: dict[str, Answer], promise: str) -> None:
    flags, *words = ROWS[promise].of(ENGINE.NAME)
    answers[promise].check_refusal(*words)
    # A user can leave out only what the user has typed.
    (line,) = answers[promise].errors
    typed = {word.partition("=")[0] for word in shlex.split(f"{ROWS[promise].options} {flags}")}
    assert set(re.findall(r"leave out (--[\w-]+)", line)) <= typed, line


def test_the_engine_s_own_help_is_shown(answers: dict[str, Answer], engine: ModuleType) -> None:
    assert answers["help"].code == 0 and engine.HELP[1] in answers["help"].output, answers["help"].output
