"""The CPU image itself: built from its Dockerfile, started, asked and stopped.

`HYBRID_TEST_IMAGE=1 pytest tests/slow/docker/test_built_image.py`: a quarter of an hour and 8 GB on two cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.server import Server, free_port, running
from tests.slow.docker.builder import Builder, missing
from tests.slow.docker.dockerfile import last

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not os.environ.get("HYBRID_TEST_IMAGE"), reason="minutes and 8 GB: set HYBRID_TEST_IMAGE=1"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
IMAGE, NAME = "hybrid-backend:cpu", "hybrid-image-test"
BIGGEST = 4.3e9
"""Bytes of all layers; 4.01 GB were measured, 1.0 of them Triton's."""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """With the image built. HYBRID_IMAGE_FOLDER: is kept, so that a second run finds the base and the layers there."""
    kept = os.environ.get("HYBRID_IMAGE_FOLDER")
    made = Builder(Path(kept) if kept else tmp_path_factory.mktemp("images"))
    made.folder.mkdir(parents=True, exist_ok=True)
    if not kept or "3.11-slim" not in made.run("buildah", "images"):
        made.make_base("Dockerfile.cpu")
    made.build("Dockerfile.cpu", IMAGE)
    yield made
    if not kept:
        made.run("buildah", "rmi", "--all", "--force", seconds=300)


@pytest.fixture(scope="module")
def server(builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The image's own command on a fresh cache, so that it fetches its model; only the port is another one."""
    folder, port = tmp_path_factory.mktemp("container"), free_port()
    command = [*last("Dockerfile.cpu", "CMD").words[:-1], str(port)]
    words = [*builder.command(NAME, IMAGE, [f"--volume={NAME}:/cache"]), *command]
    with running(words, port, folder / "container.log", builder.environment()) as started:
        yield started


def test_it_serves_as_who_it_says_it_is(builder: Builder, server: Server) -> None:
    assert server.complete("The capital of France is", 8)
    assert server.total("hybrid_selected_tokens_total") > 0
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    structured = server.complete("As JSON:", 40, extra_body={"structured_outputs": {"json": schema}})
    assert json.loads(structured)["city"] in ("Paris", "Rome")
    assert builder.podman("exec", NAME, "id", "-u") == "10001"
    builder.podman("exec", NAME, "python", "/opt/image/healthcheck.py", f"{server.url}/health")
    found = json.loads(builder.podman("exec", NAME, "hybrid", "doctor", "--json"))
    states = {check["check"]: check["state"] for check in found}
    assert states["native kernels"] == states["instruction sets"] == "ok", states
    granted = builder.podman("exec", NAME, "cat", "/proc/1/status")
    assert "CapBnd:\t0000000000800000" in granted and "NoNewPrivs:\t1" in granted, granted


def test_it_is_as_large_as_documented(builder: Builder) -> None:
    assert int(builder.podman("image", "inspect", "--format", "{{.Size}}", IMAGE)) < BIGGEST
    configured = json.loads(builder.podman("image", "inspect", IMAGE))[0]
    assert configured["Healthcheck"]["Test"][:1] == ["CMD"] and configured["User"] == "10001:10001"


def test_it_compiles_what_a_larger_machine_would(builder: Builder) -> None:
    """torch.compile needs g++ and Python's headers; on four cores and fewer nothing is compiled."""
    program = "import torch; print(torch.compile(lambda x: (x.sin() * 2).sum())(torch.ones(8)).item())"
    words = [*builder.command(f"{NAME}-compile", IMAGE, ["--entrypoint=python"]), "-c", program]
    done = subprocess.run(words, env=builder.environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("13.46"), done.stdout + done.stderr


def test_sigterm_ends_it_cleanly(builder: Builder, server: Server) -> None:
    """The last test: what `docker stop` does."""
    builder.podman("kill", "--signal", "TERM", NAME)
    assert server.process.wait(60) in (0, 128 + signal.SIGTERM), server.log.read_text()[-3000:]
    assert "Traceback" not in server.log.read_text()
