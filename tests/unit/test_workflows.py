"""The workflows: steps that a developer can repeat, actions that cannot change, permissions that are named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FILES = [*WORKFLOWS, *sorted((ROOT / ".github" / "actions").rglob("action.yml"))]
WORKFLOW = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(path.read_text())["jobs"])


def lines(path: Path) -> Iterator[str]:
    """The commands of a workflow's steps."""
    for job in jobs(path).values():
        for step in job.get("steps", ()):
            yield from step.get("run", "").splitlines()


def test_there_is_a_workflow_for_each_promise() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "nightly", "release", "wheels"]


@WORKFLOW
def test_what_a_step_runs_is_a_target_of_make_or_a_script_that_is_there(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    for line in lines(path):
        command = re.fullmatch(r"(?:version=\$\()?(make|\.ci/[\w-]+) (.*)", line)
        assert command, f"{line}: can a developer run it?"
        if command[1] == "make":
            target, *variables = command[2].split()
            assert target in targets, line
            for file, test in re.findall(r"=(tests/[\w/.]+)(?:::(\w+))?", " ".join(variables)):
                assert f"def {test}" in (ROOT / file).read_text(), line
        else:
            assert os.access(ROOT / command[1], os.X_OK), line


@WORKFLOW
def test_every_job_ends_and_names_what_it_may(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"} and "group" in workflow["concurrency"]
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job or job.get("uses", "").startswith("./"), name
        if "write" in str(job.get("permissions")):  # such a job uploads what another has built, and runs nothing
            assert "environment" in job and not [step for step in job["steps"] if "run" in step], name


def test_an_action_is_a_commit_or_lies_here() -> None:
    seen = 0
    for path in FILES:
        for line in path.read_text().splitlines():
            if used := re.search(r"uses: (\S+)(.*)", line):
                seen += 1
                if used[1].startswith("./"):
                    assert (ROOT / used[1]).exists(), line
                else:
                    assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", used[1]), line
                    assert re.fullmatch(r" # v\d+\.\d+\.\d+", used[2]), line
    assert seen > 10


def test_other_versions_of_engines_are_those_of_make() -> None:
    (others,) = re.findall(r"^OTHER_VERSIONS := ([^#\n]*)", (ROOT / "Makefile").read_text(), re.M)
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in jobs(ROOT / ".github/workflows/ci.yml").values()]
    tried = [f"{row['engine']}-{row['version']}" for matrix in matrices for row in matrix.get("include", ())]
    assert tried == others.split()


def test_a_tag_that_is_not_the_version_is_refused() -> None:
    for tag, error in (("v9.9.9", "the tag is v9.9.9, but the version is"), ("", "the tag is ,")):
        done = subprocess.run([ROOT / ".ci" / "check-tag", tag], capture_output=True, text=True, timeout=20)
        assert done.returncode == 1 and error in done.stderr


def linter(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def test_zizmor_finds_nothing() -> None:
    command = [linter("zizmor") or "zizmor", "--offline", "--quiet", ROOT / ".github"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# Its own package of PyPI downloads the program while it is installed, so it is not in requirements/test.txt.
@pytest.mark.skipif(linter("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_finds_nothing() -> None:
    command = [linter("actionlint") or "actionlint", *WORKFLOWS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
