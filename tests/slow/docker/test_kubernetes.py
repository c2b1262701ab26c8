"""The manifests of deploy/: valid, and of the image, the server and the limits that they name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hybrid_backend.engines.lifecycle import DRAIN_SECONDS, GRACE_SECONDS
from tests.slow.docker.dockerfile import DOCKER, ROOT, last
from tests.slow.docker.kubernetes import COMPONENTS, DEPLOY, OVERLAYS, container, pod, render
from tests.support.recipes import served

VERSIONS = ("1.30", "1.37")
PAGE = ROOT / "docs/start/kubernetes.md"


@pytest.fixture(scope="module", params=OVERLAYS)
def documents(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return render(DEPLOY / request.param)


@pytest.fixture
def with_components(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What the page's own kustomization gives, in a folder beside a copy of deploy/ as the page has it."""
    (written,) = re.findall(r"^```text\n# (mine/kustomization\.yaml)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    path = tmp_path / written[0]
    path.parent.mkdir()
    path.write_text(written[1])
    return render(path.parent)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(documents: dict[str, dict[str, Any]], version: str) -> None:
    for document in documents.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_refuses_an_unknown_field(documents: dict[str, dict[str, Any]]) -> None:
    service = documents["Service"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {**service["spec"], "prots": []}}, VERSIONS[-1], strict=True)


def test_the_probes_ask_what_the_health_check_asks(documents: dict[str, dict[str, Any]]) -> None:
    """The path and port of docker/scripts/healthcheck.py, which a real server answers in test_built_image.py."""
    server = container(documents)
    checked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", (DOCKER / "scripts/healthcheck.py").read_text())
    assert checked is not None
    ports = {port["name"]: str(port["containerPort"]) for port in server["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = server[probe]["httpGet"]
        assert (ports[asked["port"]], asked["path"]) == checked.groups()
    start = server["startupProbe"]
    allowed = re.search(r"--start-period=(\d+)s", last("Dockerfile.cuda", "HEALTHCHECK").rest)
    assert allowed is not None and start["periodSeconds"] * start["failureThreshold"] >= int(allowed[1])


def test_service_container_and_command_agree_on_the_port(documents: dict[str, dict[str, Any]]) -> None:
    server = container(documents)
    (port,) = documents["Service"]["spec"]["ports"]
    (exposed,) = server["ports"]
    assert port["targetPort"] == exposed["name"]
    _, _, _, flags = served(["serve", *server["args"]])
    assert flags[flags.index("--port") + 1] == str(exposed["containerPort"]) == last("Dockerfile.cpu", "EXPOSE").rest
    assert flags[flags.index("--host") + 1] == "0.0.0.0"
    selected = documents["Service"]["spec"]["selector"].items()
    assert selected and selected <= documents["Deployment"]["spec"]["template"]["metadata"]["labels"].items()


def test_the_command_is_the_images_own(documents: dict[str, dict[str, Any]]) -> None:
    server = container(documents)
    name = f"Dockerfile.{server['image'].removeprefix('hybrid-backend:')}"
    assert server["args"] == last(name, "CMD").words and "command" not in server


def test_a_pod_that_is_stopped_has_time_to_answer_its_requests(documents: dict[str, dict[str, Any]]) -> None:
    command, seconds = container(documents)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep" and int(seconds) > 0
    assert pod(documents)["terminationGracePeriodSeconds"] > int(seconds) + DRAIN_SECONDS + GRACE_SECONDS


def test_the_pod_is_what_the_restricted_standard_allows(documents: dict[str, dict[str, Any]]) -> None:
    user, group = last("Dockerfile.cpu", "USER").words[0].split(":")
    security = pod(documents)["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (int(user), int(group), int(group))
    assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container(documents)["securityContext"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert not own["allowPrivilegeEscalation"] and own["readOnlyRootFilesystem"]


def test_the_pod_has_cores_of_its_own_and_its_cache(documents: dict[str, dict[str, Any]]) -> None:
    """A pod gets cores from the static CPU manager if limits equal requests and the cores are whole."""
    resources = container(documents)["resources"]
    assert resources["requests"] == resources["limits"] and resources["limits"]["cpu"].isdigit()
    mounts = {mount["mountPath"]: mount["name"] for mount in container(documents)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(documents)["volumes"]}
    assert set(mounts.values()) == set(volumes)
    claim = volumes[mounts[last("Dockerfile.cpu", "VOLUME").words[0]]]["persistentVolumeClaim"]["claimName"]
    assert claim == documents["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "emptyDir" in volumes[mounts["/tmp"]]


def test_only_the_gpu_overlay_asks_for_a_gpu() -> None:
    gpus = {name: container(render(DEPLOY / name))["resources"]["limits"].get("nvidia.com/gpu") for name in OVERLAYS}
    assert gpus == {"cpu": None, "gpu": "1"}


def test_components_add_what_they_say(with_components: dict[str, dict[str, Any]]) -> None:
    capabilities = container(with_components)["securityContext"]["capabilities"]
    assert capabilities == {"drop": ["ALL"], "add": ["SYS_NICE"]}
    monitor, service = with_components["ServiceMonitor"], with_components["Service"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    (job,) = yaml.safe_load((DOCKER / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    assert endpoint["path"] == job["metrics_path"]


def test_the_page_names_what_there_is() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"deploy/[\w/.-]*\w", text))
    assert {f"deploy/{name}" for name in OVERLAYS} <= named
    assert all((ROOT / name).exists() for name in named), named
    assert all(f"components/{name}" in text for name in COMPONENTS)
