"""vLLM's processes sleep while they wait where no core is left for them to spin on, and only there."""

from __future__ import annotations

import pytest

from hybrid_backend.engines.cpu_defaults import BIND, RESERVED
from hybrid_backend.engines.vllm.waiting import SLEEP, choose, keeps_a_core


@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        ({}, True),  # vLLM keeps one
        ({RESERVED: "0"}, False),
        ({RESERVED: "1"}, True),
        ({RESERVED: ""}, True),
        ({BIND: "0,1"}, False),
        ({BIND: "0-1"}, False),
        ({BIND: "0|1"}, False),
        ({BIND: "0"}, True),
        ({BIND: "0", RESERVED: "0"}, True),  # what is bound wins
        ({BIND: "nobind"}, False),
    ],
)
def test_a_core_is_kept_where_vllm_says_so(environment: dict[str, str], kept: bool) -> None:
    assert keeps_a_core([0, 1], environment) is kept
    chosen = dict(environment)
    choose([0, 1], chosen)
    assert chosen == environment | ({} if kept else {SLEEP: "1"})


def test_what_the_user_chose_stays() -> None:
    environment = {RESERVED: "0", SLEEP: "0"}
    choose([0, 1], environment)
    assert environment[SLEEP] == "0"
