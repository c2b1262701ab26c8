"""vLLM, for the tests of both engines: servers, prompts, and what each method promises for which of them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from hybrid_backend.tools.bench.fidelity import FIDELITY_FLAGS
from tests.engines.methods import Exact
from tests.engines.server import Server, hybrid_server, stock_server
from tests.engines.texts import english

NAME = "vllm"
HELP = ("--help=max-model-len", "--max-model-len")  # engine flag, what must be shown
PREFIX_HITS = "vllm:prefix_cache_hits_total"
# fp32 KV of the demo model: 46,080 bytes per token. 364 MiB hold 8,283 tokens (517 pages of 16): one whole context.
POOL = 364 * 2**20
LENGTHS = (5, 17, 64, 120, 200, 333, 400, 500, 700, 900, 1200, 6950)
# Four prompts of 128 pages nearly fill the pool; their answers need 8 pages more: somebody must go.
CROWD_LENGTH, CROWD_TOKENS = 2040, 32
# Of the prompts: 5 to 400 tokens; HeadInfer, which promises any context, also gets the one of 1,200. Each method
# promises the stock backend's tokens for these prompts, but not for those of 700 tokens and more.
FOUR = (3, 4, 5, 6)
METHODS = {
    "clo": Exact(
        {"budget_tokens": 448, "sparse": "always", "frames_per_request": 32, "clo.persistent": ["0:0", "3:1"]},
        (0, 2, 4, 6),
        FOUR,
    ),
    "dense": Exact({}, (2, 5), FOUR, on_device=False),
    "hgca": Exact({"hgca.window_tokens": 448}, (0, 2, 4, 6), FOUR),
    # Two buffers of 160 tokens: a quarter of the longest context is on the device at a time.
    # Some heads never leave it. (Buffers of one page: tests/unit/runtime/test_headinfer.py.)
    "headinfer": Exact(
        {
            "staging_tokens": 160,
            "headinfer.group_thresholds": [256, 1024],
            "headinfer.resident_heads": ["3:1", "9:0", "9:2"],
        },
        (0, 2, 4, 6, 10),
        FOUR,
    ),
    "infinigen": Exact({"budget_tokens": 448, "sparse": "always", "frames_per_request": 32}, (0, 2, 4, 6), FOUR),
}


def prompts() -> list[str]:
    return [english(length, start=2500 * i) for i, length in enumerate(LENGTHS)]


def crowd() -> list[str]:
    return [english(CROWD_LENGTH, start=1000 + 5000 * i) for i in range(4)]


def stock(folder: Path, model_dir: Path) -> AbstractContextManager[Server]:
    flags = ["--dtype", "float32", "--max-num-seqs", "4", "--enforce-eager", *FIDELITY_FLAGS]
    flags += ["--kv-cache-memory-bytes", str(POOL), "--block-size", "32"]
    return stock_server(folder, model_dir, flags)


def exact_server(folder: Path, model_dir: Path, method: str) -> AbstractContextManager[Server]:
    # All pages of the longest context are resident (scout), or within the budget (quest).
    config = {"method": method, "frames_per_request": 512, "budget_tokens": 16384, "host_pool.size": POOL}
    flags = ["--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024", "--enforce-eager"]
    return hybrid_server(folder, config, flags)


def method_server(folder: Path, method: str) -> AbstractContextManager[Server]:
    keys = {"method": method, "host_pool.size": "512MiB", **METHODS[method].keys}
    flags = ["--dtype", "float32", "--max-num-batched-tokens", "512", "--enforce-eager", "--max-num-seqs", "32"]
    return hybrid_server(folder, keys, flags)
