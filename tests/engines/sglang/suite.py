"""SGLang, for the tests of both engines: servers, prompts, and what each method promises for which of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.engines.methods import Exact
from tests.engines.server import Server
from tests.engines.sglang.server import PAGE, hybrid_server, sglang_server
from tests.engines.texts import english

NAME = "sglang"
HELP = ("--help", "--chunked-prefill-size")  # engine flag, what must be shown
PREFIX_HITS = "sglang:cached_tokens_total"
LENGTHS = (6, 17, 60, 120, 300, 700, 1500, 6950)
POOL_TOKENS = 15000
BYTES_PER_TOKEN = 46080  # fp32 KV of the demo model
POOL = POOL_TOKENS * BYTES_PER_TOKEN
FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "1024", "--max-running-requests", "8")
SHORT = range(6)  # up to 700 tokens
METHODS = {
    # The longest alone is on the CPU; of those together, which come in any order, at least one.
    "apex": Exact({"apex.device_tokens": 512}, SHORT, SHORT, asks_cpu=True),
    "clo": Exact({"budget_tokens": 1024, "sparse": "always", "frames_per_request": 72}, SHORT, SHORT),
    "hgca": Exact({"hgca.window_tokens": 1024}, SHORT, SHORT),
    # Two buffers of 224 tokens: less than a third of the longest context is on the device at a time.
    "headinfer": Exact({"staging_tokens": 224, "headinfer.group_thresholds": [128, 512]}, SHORT, SHORT),
    "infinigen": Exact({"budget_tokens": 1024, "sparse": "always", "frames_per_request": 72}, SHORT, SHORT),
}


def prompts() -> list[str]:
    return [english(length, start=2500 * i) for i, length in enumerate(LENGTHS)]


def stock(folder: Path, model_dir: Path) -> AbstractContextManager[Server]:
    flags = ["--device", "cpu", "--attention-backend", "torch_native", "--page-size", str(PAGE), "--sleep-on-idle"]
    # In one piece: torch_native computes a chunk's whole prefix anew.
    flags += ["--max-total-tokens", str(POOL_TOKENS), *FLAGS, "--chunked-prefill-size", "8192"]
    return sglang_server(folder, model_dir, flags)


@contextmanager
def exact_server(folder: Path, model_dir: Path, method: str) -> Iterator[Server]:
    """Start scout as `hybrid serve` does; quest by SGLang's own command line and a file."""
    if method == "scout":
        config = {"method": "scout", "frames_per_request": 440, "host_pool.size": POOL}
        with hybrid_server(folder, config, [*FLAGS, "--max-running-requests", "4"]) as server:
            yield server
        return
    file = folder / "hybrid.yaml"
    file.write_text(f"page_size: {PAGE}\nbudget_tokens: {440 * PAGE}\nhost_pool: {{size: {POOL}}}\n")
    flags = ["--attention-backend", "hybrid", "--enable-metrics", *FLAGS]
    with sglang_server(folder, model_dir, flags, {"HYBRID_CONFIG": str(file)}) as server:
        yield server


def method_server(folder: Path, method: str) -> AbstractContextManager[Server]:
    keys = {"method": method, "host_pool.size": "256MiB", **METHODS[method].keys}
    flags = ["--dtype", "float32", "--chunked-prefill-size", "512", "--max-running-requests", "4"]
    return hybrid_server(folder, keys, flags)


def next_tokens(server: Server, prompt: str, tokens: int) -> list[dict[str, float]]:
    """Log-probabilities of the five likeliest tokens at each of ``tokens`` greedy steps."""
    answer = server.client().completions.create(
        model=server.model, prompt=prompt, max_tokens=tokens, temperature=0, logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    return [dict(top) for top in logprobs.top_logprobs if top is not None]
