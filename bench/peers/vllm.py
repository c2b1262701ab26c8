"""vLLM's CPU engine: stock, and with us. All cores compute, none is kept free (tests/engines/server.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.peers.peer import Setup
from bench.peers.quantised import quantised_folder
from hybrid_backend.engines.cpu_defaults import intel_openmp
from tests.engines.server import Server, hybrid_server, stock_server

QUANTISED_DTYPE = "bfloat16"  # of what is not quantised: vLLM's kernels for 4 bits, and with AMX for 8, take no fp32


def stock(setup: Setup) -> AbstractContextManager[Server]:
    return _stock(setup, setup.folder, setup.dtype)


def untouched(setup: Setup) -> AbstractContextManager[Server]:
    """Start vLLM with its defaults, which keep one core free for its front end."""
    environment = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    return stock_server(setup.place, setup.folder, [*_sizes(setup), *_memory(setup)], environment)


def dense(setup: Setup) -> AbstractContextManager[Server]:
    return _hybrid(setup, _equal(setup, setup.dtype), {"sparse": "never"})


def sparse(setup: Setup) -> AbstractContextManager[Server]:
    return _hybrid(setup, _equal(setup, setup.dtype), {})


def dense_kv8(setup: Setup) -> AbstractContextManager[Server]:
    return _hybrid(setup, _equal(setup, setup.dtype), {"sparse": "never", "kv_dtype": "int8"})


def sparse_kv8(setup: Setup) -> AbstractContextManager[Server]:
    return _hybrid(setup, _equal(setup, setup.dtype), {"kv_dtype": "int8"})


def stock_int8(setup: Setup) -> AbstractContextManager[Server]:
    return _stock(setup, quantised_folder(setup.model, "W8A8"), QUANTISED_DTYPE)


def stock_int4(setup: Setup) -> AbstractContextManager[Server]:
    return _stock(setup, quantised_folder(setup.model, "W4A16"), QUANTISED_DTYPE)


def sparse_int8(setup: Setup) -> AbstractContextManager[Server]:
    return _hybrid(setup, _equal(setup, QUANTISED_DTYPE), {}, quantised_folder(setup.model, "W8A8"))


def sparse_int4(setup: Setup) -> AbstractContextManager[Server]:
    return _hybrid(setup, _equal(setup, QUANTISED_DTYPE), {}, quantised_folder(setup.model, "W4A16"))


def served(setup: Setup) -> AbstractContextManager[Server]:
    """`hybrid serve MODEL` and nothing else: docs/reference/cpu-start.md says what it chooses."""
    return _hybrid(setup, _sizes(setup), {})


def _stock(setup: Setup, weights: Path, dtype: str) -> AbstractContextManager[Server]:
    return stock_server(setup.place, weights, [*_equal(setup, dtype), *_memory(setup)], intel_openmp())


def _hybrid(
    setup: Setup, flags: list[str], config: dict[str, Any], weights: Path | None = None
) -> AbstractContextManager[Server]:
    """Serve the catalogue's model, or ``weights``, a folder whose name the same configuration matches."""
    model = setup.model if weights is None else str(weights)
    return hybrid_server(setup.place, {"host_pool.size": setup.kv_bytes, **config}, flags, model)


def _sizes(setup: Setup) -> list[str]:
    return ["--max-model-len", str(setup.length), "--max-num-seqs", str(setup.batch)]


def _memory(setup: Setup) -> list[str]:
    return ["--kv-cache-memory-bytes", str(setup.kv_bytes)]


def _equal(setup: Setup, dtype: str) -> list[str]:
    # Compiled: stock's default on any machine, ours on one of more than four cores.
    return [*_sizes(setup), "--dtype", dtype, "--no-enforce-eager"]
