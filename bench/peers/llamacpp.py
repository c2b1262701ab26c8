"""llama.cpp's server: the one in the xllamacpp wheel (an AVX2 build), or a `llama-server` built for this CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.peers.gguf_files import SHIPPED, gguf_file
from bench.peers.peer import DTYPES, Setup
from tests.engines.server import Server, free_port, running

LAUNCHER = Path(__file__).with_name("llamacpp_server.py")
OWN_KV = "f16"  # what its cache holds unless told otherwise


def same_kv(setup: Setup) -> AbstractContextManager[Server]:
    kind = DTYPES[setup.dtype]
    return _server(setup, kind, kind.lower())


def own_kv(setup: Setup) -> AbstractContextManager[Server]:
    return _server(setup, DTYPES[setup.dtype], OWN_KV)


def kv8(setup: Setup) -> AbstractContextManager[Server]:
    return _server(setup, DTYPES[setup.dtype], "q8_0")


def q8(setup: Setup) -> AbstractContextManager[Server]:
    return _server(setup, "Q8_0", OWN_KV)


def shipped(setup: Setup) -> AbstractContextManager[Server]:
    return _server(setup, SHIPPED, OWN_KV)


@contextmanager
def _server(setup: Setup, precision: str, kv: str) -> Iterator[Server]:
    port, weights = free_port(), gguf_file(setup.model, precision)
    options = {
        "--model": weights, "--alias": setup.model, "--port": port, "--threads": setup.threads,
        "--ctx-size": setup.length * setup.batch, "--parallel": setup.batch, "--cache-type-k": kv, "--cache-type-v": kv,
    }  # fmt: skip
    flags = [str(word) for option in options.items() for word in option]
    if setup.native:
        # A cache of the prompts of other requests would only copy: no prompt returns after the next depth began.
        command = [str(setup.native), *flags, "--host", "127.0.0.1", "--cache-ram", "0", "--no-ui"]
    else:
        command = [str(setup.peers_python), "-P", str(LAUNCHER), *flags]
    with running(command, port, setup.place / f"llamacpp-{port}.log") as server:
        server.model = setup.model
        yield server
