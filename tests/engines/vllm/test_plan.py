"""The real engine, started as the plan says, allocates what the plan says: its /metrics are compared, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_backend.config import resolve_config
from hybrid_backend.memory_plan.blocks import Blocks
from hybrid_backend.memory_plan.footprint import MemoryRoom, MethodMemory
from hybrid_backend.tools.plan.model import find_shape
from hybrid_backend.tools.plan.report import Request, make_plan, serve_flags
from tests.engines.server import MODEL, executable, free_port, running

pytestmark = pytest.mark.engine
GIB = 2**30
# Copies in frames, two staging buffers and digests, as on a GPU; few enough that this machine has them.
KEYS = ("method=scout", "budget_tokens=512", "frames_per_request=40")


def test_metrics_of_a_real_server_are_the_plans(tmp_path: Path, model_dir: Path) -> None:
    config, _ = resolve_config(MODEL, None, {}, KEYS)
    shape = find_shape(MODEL)
    plan = make_plan(Request(shape, config, context=3000, batch=3, gpu_mem=0, ram=16 * GIB, methods=("scout",)))
    row = plan.row("scout")
    assert row.fits
    port = free_port()
    command = [executable("hybrid"), "serve", MODEL, *(f"--set={key}" for key in KEYS), *serve_flags(row, plan)]
    command += ["--port", str(port), "--enforce-eager"]
    with running(command, port, tmp_path / "server.log") as server:
        assert server.complete("The capital of France is", 4)
        real = {name: sum(values.values()) for name, values in server.metrics().items()}
    memory = MethodMemory(shape, Blocks.of(shape, config.page_size), MemoryRoom(0, 16 * GIB, 2048), config)
    expected = memory.gauges(row.pages, batch=3, max_tokens=3000)
    assert {name: real[name] for name in expected} == expected
    assert row.pages == 3 * -(-3000 // config.page_size) + 1
    planned = {item.name: item.bytes for item in row.items}
    on_device = ("digests", "frames", "staging", "method, device")
    assert real["hybrid_device_bytes"] == sum(planned[name] for name in on_device) > 0
    assert planned["host pool"] == real["hybrid_host_pool_pages"] * plan.block_bytes
