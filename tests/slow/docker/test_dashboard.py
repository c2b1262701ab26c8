"""The dashboard's expressions, asked of a real Prometheus that scrapes a real server by docker/prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.server import Server, free_port, hybrid_server
from tests.slow.docker.dockerfile import DOCKER
from tests.slow.docker.test_compose import dashboard

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here (Debian: prometheus)"),
]
# Every panel has data with it: pages are selected, some are attended on the CPU, and a mass is promised.
CONFIG = {
    "host_pool.size": "512MiB",
    "method": "scout",
    "frames_per_request": 24,
    "budget_tokens": 256,
    "lookahead.partial_query": "predicted",
    "quality.min_mass": 0.9,
    "metrics.sample_interval": 4,
}
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
PROMPT = "The quick brown fox jumps over the lazy dog. " * 100
SCRAPES = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with hybrid_server(tmp_path_factory.mktemp("dashboard"), CONFIG, FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prometheus with the shipped configuration, whose target alone is replaced."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    shipped = (DOCKER / "prometheus/prometheus.yaml").read_text()
    assert shipped.count("server:8000") == 1
    (folder / "prometheus.yaml").write_text(shipped.replace("server:8000", server.url.removeprefix("http://")))
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}, timeout=30)
    assert answer.status_code == 200, f"{expression}: {answer.text}"
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def wait_for_scrapes(prometheus: str, number: int) -> None:
    """Wait until ``number`` scrapes of the last five minutes have succeeded."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            scrapes = query(prometheus, 'sum_over_time(up{job="hybrid"}[5m])')
        except httpx.TransportError:
            scrapes = []
        if scrapes and float(scrapes[0]["value"][1]) >= number:
            return
        time.sleep(1)
    raise AssertionError(f"fewer than {number} scrapes in two minutes")


def test_every_panel_has_data(server: Server, prometheus: str) -> None:
    """A rate needs samples from before and after the requests that it counts."""
    server.complete(PROMPT, 4)
    wait_for_scrapes(prometheus, 2)
    server.complete_all([PROMPT + str(i) for i in range(2)], 24)
    wait_for_scrapes(prometheus, 2 + SCRAPES)
    empty = {}
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            samples = query(prometheus, target["expr"])
            if not [sample for sample in samples if sample["value"][1] != "NaN"]:
                empty[target["expr"]] = samples
    assert not empty, json.dumps(empty, indent=1)[:3000]


def test_prometheus_accepts_the_shipped_configuration() -> None:
    command: list[str | Path] = ["promtool", "check", "config", DOCKER / "prometheus/prometheus.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
