"""The compose file and the monitoring that it starts: valid, complete, and of metrics that are really there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from hybrid_backend.observe.metrics import Publisher
from hybrid_backend.observe.stats import Stats
from tests.slow.docker.dockerfile import DOCKER, IMAGES, last
from tests.support.recipes import served

RECORDED = Path(__file__).parents[2] / "unit" / "status" / "data" / "vllm.txt"
# PromQL's words; everything else that looks like a name is a metric or a label.
WORDS = {"sum", "max", "min", "avg", "rate", "deriv", "histogram_quantile", "by", "or"}


def load(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load("compose.yaml")["services"]
    return found


def test_server_prometheus_and_grafana_are_one_command(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == {"server", "prometheus", "grafana"}
    assert services["server"]["build"] == {"context": "..", "dockerfile": "docker/Dockerfile.cpu"}
    assert services["grafana"]["depends_on"] == ["prometheus"] and services["prometheus"]["depends_on"] == ["server"]


def test_the_server_has_the_memory_rights_that_it_needs(services: dict[str, dict[str, Any]]) -> None:
    server = services["server"]
    assert server["shm_size"] == "4gb"
    assert server["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert server["cap_drop"] == ["ALL"] and server["cap_add"] == ["SYS_NICE"]
    assert server["volumes"] == [f"cache:{last('Dockerfile.cpu', 'VOLUME').words[0]}"]


def test_nothing_listens_beyond_this_machine_and_nobody_logs_in(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert "no-new-privileges:true" in service["security_opt"], name
    grafana = services["grafana"]["environment"]
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer" and grafana["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


def test_images_are_pinned_and_mounts_exist(services: dict[str, dict[str, Any]]) -> None:
    volumes = load("compose.yaml")["volumes"]
    for service in services.values():
        assert re.search(r":(v?\d+\.\d+\.\d+|cpu)$", service["image"])
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in volumes, mount


def test_the_command_is_the_images_own(services: dict[str, dict[str, Any]]) -> None:
    written = [re.sub(r"\$\{MODEL:-(.*)\}", r"\1", word) for word in services["server"]["command"]]
    assert written == last("Dockerfile.cpu", "CMD").words


def test_the_gpu_file_changes_only_what_a_gpu_changes() -> None:
    ((name, service),) = load("compose.cuda.yaml")["services"].items()
    assert name == "server" and service["build"]["dockerfile"].removeprefix("docker/") in IMAGES
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]


def test_prefill_decode_and_router_are_one_command() -> None:
    servers = load("compose.disaggregated.yaml")["services"]
    assert set(servers) == {"prefill", "decode", "router"}
    assert [name for name, service in servers.items() if "ports" in service] == ["router"]
    assert all(port.startswith("127.0.0.1:") for port in servers["router"]["ports"])
    assert all(service["image"] == "hybrid-backend:disaggregated" for service in servers.values())
    given = {
        name: {word.partition("=")[0]: word.partition("=")[2] for word in servers[name]["command"]} for name in servers
    }
    assert given["prefill"]["--dtype"] == given["decode"]["--dtype"]
    assert given["prefill"]["--model"] in given["decode"], "NIXL compares the model's name as it was given"
    _, _, config, flags = served(["serve", *servers["decode"]["command"]])
    assert str(config.page_size) == given["prefill"]["--block-size"]
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    for name, role in roles.items():
        transfer = json.loads(given[name]["--kv-transfer-config"])
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", role)
        assert f"VLLM_NIXL_SIDE_CHANNEL_HOST={name}" in servers[name]["environment"]
        assert given["router"][f"--{name}"] == f"http://{name}:{given[name]['--port']}"
    assert any(flag.startswith("--kv-transfer-config") for flag in flags)


def test_prometheus_asks_the_server_for_its_metrics(services: dict[str, dict[str, Any]]) -> None:
    (job,) = load("prometheus/prometheus.yaml")["scrape_configs"]
    ((target,),) = (config["targets"] for config in job["static_configs"])
    name, port = target.split(":")
    assert name in services and services[name]["ports"][0].endswith(f":{port}") and job["metrics_path"] == "/metrics"
    mounted = {mount.split(":")[1] for mount in services["prometheus"]["volumes"]}
    file = services["prometheus"]["command"][0].partition("=")[2]
    assert file in mounted


def test_grafana_finds_its_datasource_and_its_dashboard(services: dict[str, dict[str, Any]]) -> None:
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in services and services[host]["ports"][0].endswith(f":{port}")
    (provider,) = load("grafana/provisioning/dashboards/hybrid.yaml")["providers"]
    mounts = dict(mount.split(":")[1::-1] for mount in services["grafana"]["volumes"])
    assert list((DOCKER / mounts[provider["options"]["path"]]).glob("*.json"))
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DOCKER / mounts[str(Path(home).parent)] / Path(home).name).is_file()
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == {source["uid"]}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCKER / "grafana/dashboards/hybrid.json").read_text())
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def exported() -> set[str]:
    """Names on a real server's /metrics, as recorded; of the plugin's those that its publisher still has."""
    registry = CollectorRegistry()
    Publisher(Stats.of(1), dict, 0, registry)
    ours = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    lines = (line for line in RECORDED.read_text().splitlines() if line and not line.startswith("#"))
    recorded = {re.split(r"[{ ]", line)[0] for line in lines}
    return {name for name in recorded if not name.startswith("hybrid_") or name in ours}


def test_every_metric_of_the_dashboard_is_exported_by_a_real_server() -> None:
    names = exported()
    asked: set[str] = set()
    for expression in expressions():
        bare = re.sub(r"\bby \([\w, ]+\)|\[\w+\]|\"[^\"]*\"", "", expression)
        asked |= set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS
    assert len(asked) > 20
    assert asked <= names, f"not exported: {sorted(asked - names)}"


def test_the_dashboard_shows_what_the_status_page_shows() -> None:
    text = " ".join(expressions())
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "hybrid_resident_hits_total", "hybrid_cpu_tokens_total", "hybrid_wait_seconds_total",
        "hybrid_recalled_pages_total", "hybrid_frames_in_use",
    ):  # fmt: skip
        assert name in text


def test_panels_do_not_overlap_and_have_names() -> None:
    taken: set[tuple[int, int]] = set()
    ids = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert panel["title"] and place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        ids.add(panel["id"])
    assert len(ids) == len(dashboard()["panels"])
