"""The address of a server: taken by the first one that starts, reached directly, named in the log."""

from __future__ import annotations

import socket
import subprocess
import sys
from urllib.request import getproxies_environment, proxy_bypass_environment

import pytest

from hybrid_backend.engines.address import ServerAddress, reach_this_machine_directly, who_can_reach

TAKES = """
import sys
from hybrid_backend.engines.address import ServerAddress
from hybrid_backend.errors import EngineError
address = ServerAddress()
try:
    address.take(["--port", sys.argv[1]], 1, ())
except EngineError as error:
    print(error, flush=True)
else:
    print("taken", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_of_servers_that_start_together_on_one_port_only_one_goes_on(free_port: str) -> None:
    """Before an engine is imported; those that lose say why."""
    command = [sys.executable, "-c", TAKES, free_port]
    servers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [server.stdout.readline().strip() for server in servers if server.stdout is not None]
    for server in servers:
        server.communicate(timeout=60)
    refusal = f"--port: {free_port} is already in use; choose another one with --port"
    assert sorted(said) == [*[refusal] * 3, "taken"]


def test_the_address_that_was_taken_is_handed_over_once_and_is_on_this_machine_only(free_port: str) -> None:
    address = ServerAddress()
    address.take([], int(free_port), ())
    listener = address.hand_over()
    assert listener is not None and listener.getsockname() == ("127.0.0.1", int(free_port))
    assert address.hand_over() is None
    listener.close()


def test_the_log_says_who_can_reach_the_server() -> None:
    assert "this machine only; --host 0.0.0.0" in who_can_reach("127.0.0.1", 8000)
    assert "everybody who can reach it; --api-key" in who_can_reach("0.0.0.0", 8000)


@pytest.mark.parametrize("given", [{}, {"no_proxy": "a.example, b.example"}, {"NO_PROXY": "a.example"}], ids=str)
def test_no_proxy_stands_before_a_server_on_this_machine(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"http_proxy": "http://proxy.example:3128", **given}
    reach_this_machine_directly(environment)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    proxies = getproxies_environment()
    assert all(proxy_bypass_environment(host, proxies) for host in ("127.0.0.1:8000", "localhost", "::1"))
    assert not proxy_bypass_environment("hub.example", proxies)
    assert all(proxy_bypass_environment(host.strip(), proxies) for each in given.values() for host in each.split(","))
