"""Attention sinks: every path of every method attends them once."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_backend.methods.registry import method_names
from tests.support.harness import PAGE, Engine, config, spec

pytestmark = pytest.mark.slow

# The least device memory that each method takes: what does not fit is the CPU's, streamed, or read where it lies.
_FRAMES = {"frames_per_request": 6}
KEYS: dict[str, dict[str, Any]] = {
    "apex": {"apex": {"device_tokens": 5 * PAGE, "strategy": "lockstep"}},
    "clo": {"clo": {"persistent": ["1:1"]}},
    "headinfer": {
        "staging_tokens": 2 * PAGE,
        "headinfer": {"resident_heads": ["1:1"], "group_thresholds": [2 * PAGE]},
    },
    "infinigen": _FRAMES,
    "scout": _FRAMES,
}
SPARSE: dict[str, dict[str, Any]] = {
    "clo": {},
    "hgca": {"hgca": {"window_tokens": 3 * PAGE}},
    "infinigen": {},
    "quest": {},
    "scout": {},
}
KERNELS = pytest.mark.parametrize("kernels", ["native", "torch", "triton"])


def engine(method: str, kernels: str, **keys: Any) -> Engine:
    if method == "quest":
        kernels = "native"
    if kernels == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    workers = {"threads": 2, "kernel": "torch" if kernels == "torch" else "native", "deadline_seconds": 60}
    cfg = config(method=method, device_kernels=kernels, workers=workers, **keys)
    return Engine(cfg, spec(3, (None, None, 24), sinks=True), num_pages=128, max_requests=3, is_witnessed=True)


@pytest.mark.parametrize("method", method_names())
@KERNELS
def test_a_method_that_attends_everything_is_exact_with_sinks(method: str, kernels: str) -> None:
    """Chunks of prompts, decoding rows beside them, a layer with a sliding window; the harness compares with fp64."""
    running = engine(method, kernels, sparse="never", **KEYS.get(method, {}))
    try:
        running.add("a", 9 * PAGE + 3)
        running.prefill("a", chunk=100)
        running.add("b", 5)
        running.step({"a": 1, "b": 5})
        for _ in range(3):
            running.step({"b": 1, "a": 1})
    finally:
        running.close()


@pytest.mark.parametrize("method", sorted(SPARSE))
def test_a_method_that_leaves_keys_out_attends_the_sinks_beside_the_others(method: str) -> None:
    running = engine(method, "auto", sparse="always", **SPARSE[method])
    try:
        running.add("a", 12 * PAGE)
        running.prefill("a")
        for _ in range(4):
            running.step({"a": 1}, tolerance=None)
        assert running.witness is not None and running.witness.sparse_rows > 0
    finally:
        running.close()
