"""The page inside vLLM's own server process, under load."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hybrid_backend.status import MIDDLEWARE
from hybrid_backend.status.app import PAGE
from tests.engine.server import hybrid_server
from tests.engine.texts import english
from tests.status.test_app import status_of

pytestmark = pytest.mark.engine


def test_vllms_own_server_serves_the_page_of_what_it_does(tmp_path: Path) -> None:
    keys = {"host_pool.size": "512MiB", "tiers": "separate", "slots_per_request": 12, "budget_tokens": 256}
    flags = ["--max-num-seqs", "4", "--max-model-len", "4096", "--enforce-eager", "--api-key", "secret"]
    flags += ["--middleware", MIDDLEWARE]
    with hybrid_server(tmp_path, keys, flags) as server, ThreadPoolExecutor(2) as pool:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401, "the engine's own rules still hold"
        client = server.client().with_options(api_key="secret")
        asked = [
            pool.submit(
                client.completions.create,
                model=server.model,
                prompt=english(700, 900 * i),
                max_tokens=80,
                temperature=0,
            )
            for i in range(2)
        ]
        assert "hybrid status" in httpx.get(server.url + PAGE).text
        running = []
        while not all(answer.done() for answer in asked):
            status = status_of(server.url)
            running += [column.running for column in status.columns]
            time.sleep(0.5)
        for answer in asked:
            assert answer.result().choices[0].text
        time.sleep(2.5)
        status = status_of(server.url)
    assert max(value or 0 for value in running) >= 2
    assert status.problem is None and status.engine == "vllm" and len(status.layers) == 30
    assert status.layers[10].residency is not None and 0 < status.layers[10].residency <= 1
    assert status.layers[10].cpu_ratio is not None and 0 < status.layers[10].cpu_ratio < 1
    assert status.host_pool_pages and status.device_bytes
