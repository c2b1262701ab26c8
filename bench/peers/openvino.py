"""OpenVINO GenAI, behind a small OpenAI-compatible server (openvino_server.py). It reads the catalogue's GGUF itself.

Its reader takes F16, Q8_0, Q4_0, Q4_1 and Q4_K_M, not F32 and BF16: the equal-precision row reads F16 (SmolLM2's and
Qwen's bf16 weights lose nothing that matters for speed) and computes, and keeps KV, in the run's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.peers.gguf_files import SHIPPED, gguf_file
from bench.peers.peer import Setup
from tests.engines.server import Server, free_port, running

SERVER = Path(__file__).with_name("openvino_server.py")
_HINTS = {"float32": "f32", "bfloat16": "bf16"}


def equal(setup: Setup) -> AbstractContextManager[Server]:
    return _equal(setup, _HINTS[setup.dtype])


def kv8(setup: Setup) -> AbstractContextManager[Server]:
    return _equal(setup, "u8")


def q8(setup: Setup) -> AbstractContextManager[Server]:
    return _server(setup, "Q8_0")


def shipped(setup: Setup) -> AbstractContextManager[Server]:
    return _server(setup, SHIPPED)


def _equal(setup: Setup, kv: str) -> AbstractContextManager[Server]:
    hint = _HINTS[setup.dtype]
    return _server(setup, "F16", f"INFERENCE_PRECISION_HINT={hint}", f"KV_CACHE_PRECISION={kv}")


@contextmanager
def _server(setup: Setup, precision: str, *properties: str) -> Iterator[Server]:
    port = free_port()
    weights = gguf_file(setup.model, precision)
    command = [  # -P: this folder has modules named as packages
        str(setup.peers_python), "-P", str(SERVER), "--model", str(weights), "--alias", setup.model,
        "--port", str(port), "--batch", str(setup.batch), "--kv-bytes", str(setup.kv_bytes),
        f"INFERENCE_NUM_THREADS={setup.threads}", *properties,
    ]  # fmt: skip
    with running(command, port, setup.place / f"openvino-{port}.log") as server:
        server.model = setup.model
        yield server
