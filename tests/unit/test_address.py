"""Servers on this machine are asked directly, whatever proxy the user has."""

from __future__ import annotations

from urllib.request import getproxies_environment, proxy_bypass_environment

import pytest

from hybrid_backend.engines.address import reach_this_machine_directly


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
