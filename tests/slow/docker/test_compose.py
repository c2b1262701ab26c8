"""The compose files and the monitoring that is started: valid, complete, and of metrics that are really there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from hybrid_backend.engines.lifecycle import DRAIN_SECONDS, GRACE_SECONDS
from hybrid_backend.observe.metrics import Publisher
from hybrid_backend.observe.stats import Stats
from hybrid_backend.tools.bench import servers
from tests.slow.docker.dockerfile import DOCKER, ENGINES, IMAGES, ROOT, last
from tests.support.recipes import served

RECORDED = Path(__file__).parents[2] / "unit" / "status" / "data" / "vllm.txt"
# PromQL's words; everything else that looks like a name is a metric or a label.
WORDS = {"sum", "max", "min", "avg", "rate", "deriv", "histogram_quantile", "by", "or", "Inf"}
# Published where quality.min_mass is set, which the recorded server did not have.
PROMISED = {"hybrid_quality_min_mass", "hybrid_quality_mass", "hybrid_quality_budget_tokens"}


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
    assert server["read_only"] and server["tmpfs"] == ["/tmp:exec"]
    assert server["volumes"] == [f"cache:{last('Dockerfile.cpu', 'VOLUME').words[0]}"]


@pytest.mark.parametrize("file", ["compose.yaml", "compose.disaggregated.yaml"])
def test_a_server_that_is_stopped_has_time_to_answer_its_requests(file: str) -> None:
    servers = [service for service in load(file)["services"].values() if "shm_size" in service]
    assert servers
    for service in servers:
        assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS + GRACE_SECONDS


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
    assert name == "server" and service["build"]["dockerfile"].removeprefix("docker/") in ENGINES
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]


def test_prefill_decode_and_router_are_one_command() -> None:
    apart = load("compose.disaggregated.yaml")["services"]
    assert set(apart) == {"prefill", "decode", "router"}
    assert [name for name, service in apart.items() if "ports" in service] == ["router"]
    assert all(port.startswith("127.0.0.1:") for port in apart["router"]["ports"])
    assert all(service["image"] == "hybrid-backend:disaggregated" for service in apart.values())
    assert all(service["build"]["dockerfile"].removeprefix("docker/") in IMAGES for service in apart.values())
    given = {
        name: {word.partition("=")[0]: word.partition("=")[2] for word in apart[name]["command"]} for name in apart
    }
    assert given["prefill"]["--dtype"] == given["decode"]["--dtype"]
    assert given["prefill"]["--model"] in given["decode"], "NIXL compares the model's name as it was given"
    _, _, config, flags = served(["serve", *apart["decode"]["command"]])
    assert str(config.page_size) == given["prefill"]["--block-size"]
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    for name, role in roles.items():
        transfer = json.loads(given[name]["--kv-transfer-config"])
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", role)
        assert f"VLLM_NIXL_SIDE_CHANNEL_HOST={name}" in apart[name]["environment"]
        assert given["router"][f"--{name}"] == f"http://{name}:{given[name]['--port']}"
    assert any(flag.startswith("--kv-transfer-config") for flag in flags)


def test_the_stock_server_is_started_as_the_tests_start_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the compose file, and wherever a page says how: what the tests prove is of this server, without our plugin."""
    started: list[Any] = []

    @contextmanager
    def note(command: Sequence[str], *place: Any) -> Iterator[None]:
        started.extend((command, place[-1]))
        yield

    monkeypatch.setattr(servers, "running", note)
    with servers.stock_server(tmp_path, tmp_path):
        pass
    command: Sequence[str] = started[0][1:3]
    variables: Mapping[str, str] = started[1]
    set_here = [f"{name}={value}" for name, value in variables.items()]
    assert set_here
    prefill = load("compose.disaggregated.yaml")["services"]["prefill"]
    assert prefill["entrypoint"] == ["python", *command]
    assert {*set_here} <= {*prefill["environment"]}
    shown = 0
    for page in (ROOT / "docs" / "guides" / "disaggregate.md", ROOT / "recipes" / "disaggregated-prefill.md"):
        whole = re.sub(r"\\\n\s+", "", page.read_text())
        for line in re.findall(rf"^.*{' '.join(command)}.*$", whole, re.M):
            shown += 1
            assert all(each in line.split() for each in set_here), f"{page.name}: {line}"
    assert shown == 2


def test_each_server_computes_on_cores_that_the_user_gives_it() -> None:
    """By a variable as in the tests, not by a cpuset: docs/guides/disaggregate.md says why."""
    apart = load("compose.disaggregated.yaml")["services"]
    asked = []
    for name in ("prefill", "decode"):
        (bound,) = (each for each in apart[name]["environment"] if each.startswith("VLLM_CPU_OMP_THREADS_BIND="))
        found = re.fullmatch(r"\$\{(\w+):\?.+\}", bound.partition("=")[2])
        assert found is not None, bound
        asked.append(found[1])
    assert len({*asked}) == 2
    assert not [name for name, service in apart.items() if "cpuset" in service]
    compose = DOCKER / "compose.disaggregated.yaml"
    for page in (compose, ROOT / "recipes/disaggregated-prefill.md"):
        (command,) = re.findall(rf"^.*docker compose -f docker/{compose.name} up", page.read_text(), re.M)
        assert all(f"{name}=" in command for name in asked), f"{page.name}: {command}"


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
    return {name for name in recorded if not name.startswith("hybrid_") or name in ours} | (PROMISED & ours)


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
        "hybrid_recalled_pages_total", "hybrid_frames_in_use", "hybrid_quality_mass", "hybrid_quality_budget_tokens",
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
