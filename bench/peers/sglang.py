"""SGLang's CPU backend that any x86 has: torch_native."""

from __future__ import annotations

from contextlib import AbstractContextManager

from bench.peers.peer import Setup
from tests.engines.server import Server
from tests.engines.sglang.server import sglang_server


def stock(setup: Setup) -> AbstractContextManager[Server]:
    flags = ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", setup.dtype, "--sleep-on-idle"]
    flags += ["--context-length", str(setup.length), "--max-running-requests", str(setup.batch)]
    flags += ["--max-total-tokens", str(setup.length * setup.batch), "--enable-cache-report"]
    environment = {"OMP_NUM_THREADS": str(setup.threads), "PYTHONPATH": ""}
    return sglang_server(setup.place, setup.folder, flags, environment, str(setup.sglang_python))
