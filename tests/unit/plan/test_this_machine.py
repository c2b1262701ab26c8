"""A plan without ``--machine``, which is for the machine that it runs on."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch

from hybrid_backend.host_memory import System
from hybrid_backend.kernels import cpu
from hybrid_backend.memory_plan.footprint import UTILIZATION
from hybrid_backend.tools.plan.local import LocalMachine
from tests.unit.plan.test_report import GIB, run


def test_without_a_machine_this_one_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is what `hybrid doctor` calls available, its device what torch sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    local = LocalMachine.probe()
    assert (
        local.gpu is None
        and local.gpu_bytes == 0
        and 1 <= local.cores <= len(os.sched_getaffinity(0))
        and local.hardware is None
    )
    assert 0 < local.host_bytes <= System().meminfo("MemTotal")
    monkeypatch.setattr(LocalMachine, "probe", lambda: local)  # other processes' memory changes meanwhile
    result = run(model="qwen3-8b")
    assert result.exit_code == ("Nothing holds" in result.stdout), result.output
    cores = "1 core" if local.cores == 1 else f"{local.cores} cores"
    assert f"on this machine (no GPU, {cores})" in result.stdout and "no device memory" in result.stdout
    planned = json.loads(run("--json").stdout)
    assert planned["device_limit"] == 0 and planned["host_limit"] == pytest.approx(local.host_bytes, rel=0.01)
    assert json.loads(run("--json", "--ram", "7").stdout)["host_limit"] == 7 * GIB
    on_gpu = json.loads(run("--json", "--gpu-mem", "24").stdout)
    assert on_gpu["device_limit"] == int(24 * GIB * UTILIZATION) and on_gpu["machine"] is None


@pytest.mark.parametrize(
    ("name", "sheet"),
    [("NVIDIA A100-SXM4-80GB", "a100-80"), ("Some GPU of tomorrow", None), ("NVIDIA H100 PCIe", None)],
)
def test_a_gpu_of_this_machine_is_planned_with_its_memory_and_with_the_rates_of_its_data_sheet(
    name: str, sheet: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(name=name, total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    planned = json.loads(run("--json", "--ram", "100", "--method", "scout").stdout)
    assert planned["device_limit"] == int(79 * GIB * UTILIZATION) and name in planned["machine"]
    assert planned["host_limit"] == 100 * GIB
    assert planned["has_times"] == (sheet is not None) == (planned["rows"][1]["tokens_per_s"] is not None)
    assert (f"rates of {sheet}'s data sheet" in planned["machine"]) == (sheet is not None)


def test_another_cpu_server_is_planned_with_native_kernels_where_this_machine_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without ``--machine`` the plan is for this machine, where ``auto`` is then `scout`."""
    monkeypatch.setattr(cpu, "why_unavailable", lambda: "the native kernels were not built: install g++")
    there = json.loads(run("--json", "--machine", "xeon-8480").stdout)
    assert there["configured"] == "quest" and "quest" in [row["name"] for row in there["rows"]]
    assert next(row for row in there["rows"] if row["name"] == "quest")["refused"] is None
    here = json.loads(run("--json", "--gpu-mem", "0", "--ram", "64").stdout)
    assert here["configured"] == "scout"
    assert "were not built: install g++" in next(row for row in here["rows"] if row["name"] == "quest")["refused"]
