"""The CPU image itself: built from its Dockerfile, then run as compose.yaml and as deploy/cpu say, asked and stopped.

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
import yaml

from tests.engines.server import Server, free_port, running
from tests.slow.docker.builder import Builder, missing
from tests.slow.docker.dockerfile import last
from tests.slow.docker.kubernetes import DEPLOY, container, pod, render

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not os.environ.get("HYBRID_TEST_IMAGE"), reason="minutes and 8 GB: set HYBRID_TEST_IMAGE=1"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
IMAGE, NAME = "hybrid-backend:cpu", "hybrid-image-test"
CACHE = "hybrid-cache"
"""The volume's name in deploy/: the pod finds the model that the container before it fetched."""
BIGGEST = 3.3e9
"""Bytes of all layers; 3.08 GB were measured."""


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
    builder.podman("volume", "rm", "--force", CACHE)
    command = [*last("Dockerfile.cpu", "CMD").words[:-1], str(port)]
    words = [*builder.command(NAME, IMAGE, [f"--volume={CACHE}:/cache"]), *command]
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
    for folder in ("/cache", "/cache/models", "/cache/huggingface"):
        assert builder.podman("exec", NAME, "stat", "--format", "%u:%g", folder) == "10001:10001"
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
    """What `docker stop` does."""
    builder.podman("kill", "--signal", "TERM", NAME)
    assert server.process.wait(60) in (0, 128 + signal.SIGTERM), server.log.read_text()[-3000:]
    assert "Traceback" not in server.log.read_text()


def test_the_pod_of_the_cpu_manifests_serves_and_ends(builder: Builder, server: Server, tmp_path: Path) -> None:
    """The Deployment of deploy/cpu, played by podman: its user, limits, read-only root and volumes.

    Podman has no probes, so this test asks for their path. The claim is left out, as the volume exists already.
    Podman's emptyDir belongs to root, so folders with the mode that Kubernetes gives take its place.
    """
    documents, port = render(DEPLOY / "cpu"), free_port()
    for volume in pod(documents)["volumes"]:
        if volume.pop("emptyDir", None) is not None:
            (tmp_path / volume["name"]).mkdir()
            (tmp_path / volume["name"]).chmod(0o777)
            volume["hostPath"] = {"path": str(tmp_path / volume["name"]), "type": "Directory"}
    manifests = yaml.safe_dump(documents["Deployment"]).replace("8000", str(port))
    log = tmp_path / "pod.log"
    with builder.pod(manifests) as name:
        follow = ["podman", "logs", "--follow", name]
        with running(follow, port, log, builder.environment()) as started:
            assert started.complete("The capital of France is", 8)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                path = container(documents)[probe]["httpGet"]["path"]
                assert started.http().get(f"{started.url}{path}").status_code == 200
            status = builder.podman("exec", name, "cat", "/proc/1/status")
            assert "CapBnd:\t0000000000000000" in status and "NoNewPrivs:\t1" in status, status
            assert "Seccomp:\t2" in status and "Uid:\t10001" in status, status
            builder.podman("stop", "--time", str(pod(documents)["terminationGracePeriodSeconds"]), name)
            assert builder.podman("wait", name) in ("0", "143"), log.read_text()[-3000:]
    text = log.read_text()
    assert "SIGTERM: ending after the requests in flight" in text and "Traceback" not in text, text[-3000:]


def test_the_disaggregated_image_has_nixl_and_the_router(builder: Builder) -> None:
    builder.build("Dockerfile.disaggregated", "hybrid-backend:disaggregated")
    for tool, *arguments in (("python", "-c", "import nixl._api"), ("vllm-router", "--help")):
        words = builder.command(f"{NAME}-transfer", "hybrid-backend:disaggregated", [f"--entrypoint={tool}"])
        builder.run(*words, *arguments, seconds=300)
