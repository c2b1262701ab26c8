"""The host pool's size is one that vLLM's own check grants, later, when weights are loaded and all is compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_host_memory import GIB

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def told(model_dir: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.host_pool_probe", str(model_dir)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", ["small node", "container"])
def test_vllm_grants_the_automatic_pool(told: dict[str, Any], name: str) -> None:
    case = told["cases"][name]
    assert "error" not in case and case["granted"] and case["kept"], case
    assert not case["old rule granted"], "half of the machine's memory is what vLLM refuses here"


def test_the_automatic_pool_is_not_smaller_than_it_must_be(told: dict[str, Any]) -> None:
    weights = 269_030_016
    assert told["cases"]["small node"]["size"] == pytest.approx((7.5 * GIB - weights) / 2, abs=8192)


def test_our_reading_of_a_node_is_vllm_s(told: dict[str, Any]) -> None:
    case = told["cases"]["small node"]
    assert case["node"] == case["vllm"]
    assert all(ours == theirs for ours, theirs in told["nodes"]) and len(told["nodes"]) == 7, told["nodes"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("small node, host_pool.size", "host_pool.size: 7GiB"),
        ("small node, flag", "--kv-cache-memory-bytes: 7GiB"),
        ("small node, variable", "VLLM_CPU_KVCACHE_SPACE: 7GiB"),
        ("small node, blocks", "--num-gpu-blocks-override: "),
    ],
)
def test_a_size_that_vllm_would_refuse_is_refused_by_its_name(told: dict[str, Any], name: str, key: str) -> None:
    case = told["cases"][name]
    assert not case["granted"]
    assert case["error"].startswith(key), case
    assert "7.5 GiB available on NUMA node 0" in case["error"] and "choose at most" in case["error"]


def test_a_size_that_fits_is_kept(told: dict[str, Any]) -> None:
    case = told["cases"]["small node, a size that fits"]
    assert case["size"] == 5 * GIB and case["granted"] and case["kept"] and "error" not in case, case


def test_an_automatic_pool_that_holds_no_whole_sequence_is_refused_with_the_length_that_it_holds(
    told: dict[str, Any],
) -> None:
    error = told["cases"]["full node"]["error"]
    assert error.startswith("host_pool.size: auto, ") and "1.8 GiB available on NUMA node 0" in error
    assert "one sequence of --max-model-len 8192 (181 MiB)" in error and "choose --max-model-len " in error
