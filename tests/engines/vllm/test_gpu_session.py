"""The rehearsal of a session on a GPU (bench/gpu_session): every kind of case to its end, on the simulated GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_session.journal import DONE, Journal
from bench.gpu_session.plan import METHODS, cases
from bench.gpu_session.rehearsal import sizes
from tests.engines.probes import ROOT

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is nothing to rehearse"),
    pytest.mark.skipif(
        not os.environ.get("HYBRID_TEST_GPU_SESSION"),
        reason="takes half an hour: alone, with HYBRID_TEST_GPU_SESSION=1 (make test-gpu-session)",
    ),
]

MINUTES = 55


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    folder = tmp_path_factory.mktemp("session")
    command = [sys.executable, "-m", "bench.gpu_session", "--rehearse", "--budget", str(MINUTES), "--out", str(folder)]
    with (folder / "log").open("wb") as log:
        subprocess.run(
            command, cwd=ROOT, env=os.environ, stdout=log, stderr=log, timeout=60 * MINUTES + 120, check=False
        )
    return folder


def figures(out: Path, part: str) -> list[dict[str, Any]]:
    lines = Journal(out / "session.jsonl").lines()
    return [line["figures"] for line in lines if line["event"] == "result" and line["part"] == part]


def test_every_case_is_done_and_in_the_table(out: Path) -> None:
    ended = {line["case"]: line for line in Journal(out / "session.jsonl").lines() if line["event"] == "end"}
    failed = {name: line["log"] for name, line in ended.items() if line["status"] != DONE}
    assert not failed, failed
    assert {case.name for case in cases(sizes(out / "model"))} == set(ended), (out / "log").read_text()[-2000:]
    summary = (out / "summary.md").read_text()
    assert set(re.findall(r"^\| ([\w-]+) \| done", summary, re.M)) == set(ended)
    assert "no measurements" in summary and "tuned input" in summary


def test_servers_answer_over_http_as_stock_does(out: Path) -> None:
    """The second line is of a server with the hybrid backend: its counters say so."""
    stock, hybrid, both, *accuracy = figures(out, "serve")
    assert "selected_tokens" not in stock and hybrid["selected_tokens"] > 0
    assert both["prompts"] == both["equal"] > 0 and both["tokens"] == both["equal_tokens"]
    assert {line["what"] for line in accuracy} == {"prompt", "mean"}


def test_prompts_traffic_and_kernels_are_measured_beside_stock(out: Path) -> None:
    contexts = [(line["kind"], line["context"]) for line in figures(out, "prefill") if "context" in line]
    assert contexts == [(kind, tokens) for kind in ("TRITON_ATTN", "scout") for tokens in (64, 300)]
    traffic = figures(out, "traffic")
    assert [line["kind"] for line in traffic] == ["stock", "scout"]
    assert all(line["completed"] == 3 and not line["failed"] for line in traffic)
    assert {"page_scores", "select_pages", "paged_partial", "merge_partials", "copy_pages"} <= {
        line["kernel"] for line in figures(out, "kernels")
    }


def test_every_method_decodes(out: Path) -> None:
    timed = {line["kind"]: line for line in figures(out, "decode") if "step_ms" in line}
    assert {*METHODS, "TRITON_ATTN", "no-lookahead", "no-recall"} == set(timed)
    assert all(line["batch"] > 0 for line in timed.values())
    assert timed["scout"]["on_cpu"] > 0 and timed["scout"]["recalled"] > 0, "steps are sparse"
