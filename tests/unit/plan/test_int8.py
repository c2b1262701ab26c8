"""`hybrid plan` with K and V in 8 bits."""

from __future__ import annotations

import json

import pytest

from tests.unit.plan.test_report import run

PLAN = ("--machine", "xeon-8480", "--context", "32k", "--json")


def test_8_bits_hold_almost_twice_the_sequences_and_stock_s_row_stays() -> None:
    plain, encoded = (json.loads(run(*PLAN, *more, model="qwen3-8b").stdout) for more in ((), ("--set=kv_dtype=int8",)))
    before, quest = (next(row for row in plan["rows"] if row["name"] == "quest") for plan in (plain, encoded))
    assert encoded["block_bytes"] / plain["block_bytes"] == pytest.approx(130 / 256)
    assert 1.85 < quest["max_batch"] / before["max_batch"] < 2.0  # digests stay as they are
    assert quest["step_ms"] < before["step_ms"]
    assert encoded["rows"][0] == plain["rows"][0], "stock has no such pages"


@pytest.mark.parametrize("method", ["scout", "dense", "infinigen", "headinfer", "clo", "apex", "hgca"])
def test_a_gpu_s_methods_hold_almost_twice_the_sequences(method: str) -> None:
    """Where nothing but K and V takes room: digests and the buffers of steps stay as they are."""
    plan = ("--machine", "h200", "--ram", "96GiB", "--context", "32k", "--json", "--method", method)
    plain, encoded = (json.loads(run(*plan, *more, model="qwen3-8b").stdout) for more in ((), ("--set=kv_dtype=int8",)))
    before, after = (next(row for row in x["rows"] if row["name"] == method) for x in (plain, encoded))
    assert encoded["block_bytes"] / plain["block_bytes"] == pytest.approx(130 / 256)
    # Both numbers are rounded down, so that 10.9 sequences and 21.0 are 10 and 21.
    assert 1.85 * before["max_batch"] < after["max_batch"] < 2.0 * (before["max_batch"] + 1)


def test_sliding_windows_on_a_gpu_are_refused_in_one_line() -> None:
    refused = run("--machine", "a100", "--set=kv_dtype=int8", "--json", model="google/gemma-3-12b-it")
    assert refused.exit_code != 0 and "\n" not in str(refused.exception)
    assert "kv_dtype: int8 does not serve google/gemma-3-12b-it" in str(refused.exception)
