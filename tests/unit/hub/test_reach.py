"""Models of the hub: what a user without a network, or with a wrong name, is told, and how soon."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub import check_hub, hub_folder


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)


def at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's library ask ``url``."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        at(f"http://127.0.0.1:{probe.getsockname()[1]}", monkeypatch)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that has the config.json of org/here, and no other file. Yields the paths that were asked for."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            is_here, is_repository = "config.json" in self.path and "org/here" in self.path, "org/" in self.path
            self.send_response(200 if is_here else 404)
            error = "EntryNotFound" if is_repository else "RepoNotFound"
            headers = {"ETag": '"1"', "X-Repo-Commit": "0" * 40} if is_here else {"X-Error-Code": error}
            for name, value in {**headers, "Content-Length": "2"}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield asked
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("closed_port")
@pytest.mark.parametrize(
    "command", [["serve"], ["plan"], ["profile", "--out", "x.yaml"], ["bench", "accuracy", "--model"]]
)
def test_without_a_network_every_command_gives_up_at_once(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's library alone repeats a request for half a minute, and an engine does that for several files."""
    monkeypatch.chdir(tmp_path)
    check_imports = CliRunner().invoke(app, ["plan", "smollm2-135m-instruct", "--gpu-mem=0", "--ram=8GiB"])
    assert check_imports.exit_code == 0, check_imports.output
    begin = time.monotonic()
    refused = CliRunner().invoke(app, [*command, "org/absent"])
    assert refused.exit_code == 1, refused.output
    assert "error: org/absent: not in the hub's cache, and cannot be had from http://127.0.0.1" in refused.stderr
    assert "check the network and HTTPS_PROXY, or give a directory with a config.json" in refused.stderr
    assert time.monotonic() - begin < 15


def test_a_model_of_the_hub_is_asked_for_once_and_accepted(hub: list[str]) -> None:
    check_hub("org/here")
    assert hub == ["/org/here/resolve/main/config.json"]


@pytest.mark.usefixtures("hub")
def test_a_wrong_name_is_told(hub: list[str]) -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing: http.* has no such model for this user .*set HF_TOKEN"):
        check_hub("nobody/nothing")
    assert len(hub) == 1


@pytest.mark.usefixtures("hub")
def test_a_model_without_a_config_json_is_left_to_the_engine() -> None:
    check_hub("org/mistral-format")


@pytest.mark.usefixtures("closed_port")
def test_a_directory_and_another_hub_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_hub(str(tmp_path))
    assert hub_folder(str(tmp_path)) == str(tmp_path)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    check_hub("org/absent")


def test_offline_is_told_apart_from_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids fetching it; unset it, or give a directory"):
        check_hub("org/absent")


@pytest.mark.usefixtures("closed_port")
@pytest.mark.parametrize("offline", [True, False])
def test_a_cached_model_needs_no_network(offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of the hub's own cache, as huggingface_hub writes it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    repository, commit = tmp_path / "hub" / "models--org--tiny", "0" * 40
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    begin = time.monotonic()
    check_hub("org/tiny")
    assert hub_folder("org/tiny") == str(folder)
    assert time.monotonic() - begin < 15
