"""`hybrid doctor`: its findings, its status, the configuration that it judges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hybrid_backend.engines.registry import installed_version
from hybrid_backend.kernels.cpu import library
from hybrid_backend.tools.doctor.command import doctor, examine
from hybrid_backend.tools.doctor.finding import Finding, unknown
from hybrid_backend.tools.doctor.machine import (
    check_ram,
)
from hybrid_backend.tools.doctor.software import (
    check_config,
    torch_build,
)
from tests.unit.doctor.machines import GIB, states, write


def test_what_is_not_ok_has_a_fix_on_one_line() -> None:
    with pytest.raises(ValueError, match="needs a fix"):
        Finding("RAM", "problem", "none")
    with pytest.raises(ValueError, match="one line"):
        Finding("RAM", "ok", "a\nb")
    finding = unknown("RAM", OSError("no\nway"), "look")
    assert (finding.state, finding.text) == ("warning", "cannot be checked: no way")


def test_this_machine_is_examined_and_the_real_probes_agree_with_it() -> None:
    import torch

    findings = list(examine())
    assert {finding.check for finding in findings} >= {
        "torch", "GPU", "FlashInfer", "native kernels", "cores", "NUMA library", "NUMA nodes", "RAM", "shared memory",
        "configuration",
    }  # fmt: skip
    assert states(findings)["native kernels"] == ("ok" if library.LIBRARY.exists() else "warning")
    build = torch_build()
    assert build is not None and (build.version, build.sees_gpu) == (torch.__version__, torch.cuda.is_available())
    available = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    assert check_ram(2 * int(available.split()[1]) * 1024).state == "problem"
    assert installed_version("torch") == torch.__version__
    assert installed_version("no-such-package-here") is None


def test_the_status_is_1_only_with_a_problem(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(doctor)
    good = write(tmp_path, {"good.yaml": "budget_tokens: 1024\n"}) / "good.yaml"
    bad = write(tmp_path, {"bad.yaml": "budget_token: 1024\n"}) / "bad.yaml"
    runner = CliRunner()
    told = runner.invoke(app, ["--config", str(good), "--json"])
    findings = json.loads(told.output)
    problems = [x for x in findings if x["state"] == "problem"]
    assert told.exit_code == (1 if problems else 0)
    assert all(set(x) == {"check", "state", "found", "fix"} for x in findings)
    refused = runner.invoke(app, ["--config", str(bad)], env={"COLUMNS": "200"})
    assert refused.exit_code == 1
    assert "did you mean budget_tokens?" in " ".join(refused.output.split())
    assert "problem" in refused.output


@pytest.mark.parametrize(
    ("text", "state", "found"),
    [
        (None, "ok", "no file given: the model's own, or the default"),
        ("method: hgca\nhost_pool: {size: 8GiB}\n", "ok", "method hgca"),
        ("budget_tokens: 100\npage_size: 32\n", "problem", "budget_tokens"),
        ("method: scoot\n", "problem", "unknown method 'scoot'"),
        ("workers: {kernel: nosuch}\n", "problem", "unknown kernel 'nosuch'"),
        ("", "problem", "is empty"),
    ],
)
def test_a_configuration_is_judged_in_the_words_of_serve(
    tmp_path: Path, text: str | None, state: str, found: str
) -> None:
    file = tmp_path / "a.yaml"
    if text is not None:
        file.write_text(text)
    finding, config = check_config(None, {} if text is None else {"HYBRID_CONFIG": str(file)})
    assert finding.state == state and found in finding.text
    assert config.host_pool.size_bytes == (8 * GIB if text and "8GiB" in text else None)
    assert check_config(tmp_path / "absent.yaml", {})[0].state == "problem"


def test_the_doctor_starts_no_engine() -> None:
    """It must run where an engine is broken."""
    module = "hybrid_backend.tools.doctor.command"
    code = f"import sys; from {module} import examine; list(examine()); print('vllm' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert told.stdout.split()[-1] == "False"
