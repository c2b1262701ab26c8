"""How long HGCA's judging of a prompt holds up the engine's thread, and how long it takes in all.

    python -m bench.judging [--tokens 32768] [--layers 2] [--rounds 5] [--threads 2]

Two ways take turns over the same prompt, with the shapes of one rank of a 14B model (40 query heads, 8 KV heads of 128
channels, bf16): torch in the calling thread, and native threads in the background. Then decode partials of a layer are
timed with and without a prompt in the background. Writes bench/out/judging.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from hybrid_backend.attention.partial import PageList
from hybrid_backend.kernels import judging_oracle
from hybrid_backend.kernels.cpu import NativeJudging, Pool
from hybrid_backend.kernels.cpu.variants import this_cpu
from hybrid_backend.kernels.operations import LayerToJudge, PromptToJudge

HEADS, KV_HEADS, DIM, PAGE, QUERIES, WINDOW = 40, 8, 128, 16, 64, 4096
ATTENDED = 4096  # tokens of a partial: an eighth of the prompt
POLL_SECONDS = 0.002


def prompt_of(tokens: int, layers: int) -> PromptToJudge:
    """Return a random prompt. Peaked queries leave each head a part of the tokens."""
    rng = torch.Generator().manual_seed(0)
    pages = -(-tokens // PAGE)
    shape = (pages, KV_HEADS, 2, PAGE, DIM)
    made = []
    for _ in range(layers):
        host = torch.randn(shape, generator=rng).to(torch.bfloat16)
        q = (torch.randn(QUERIES, HEADS, DIM, generator=rng) * 2).to(torch.bfloat16)
        made.append(LayerToJudge(q, host, torch.zeros(shape, dtype=torch.bfloat16)))
    order = torch.randperm(pages, generator=rng).int()
    first, older = PAGE, tokens - WINDOW
    return PromptToJudge(made, order, tokens, first, older, 1.0 / (older - first), DIM**-0.5)


def in_background(pool: Pool, prompt: PromptToJudge) -> dict[str, float]:
    """Judge a prompt in the pool; return seconds.

    Returns:
        ``blocked``: submission and polls in the calling thread; ``own_cpu``: CPU time of that thread, sleeps between
        polls included; ``whole``: until the judgement was there; ``cpu``: CPU time of all threads.
    """
    began, own_cpu, cpu = time.perf_counter(), time.thread_time(), time.process_time()
    judging = NativeJudging(pool, prompt, "a prompt")
    blocked = time.perf_counter() - began
    while True:
        polled = time.perf_counter()
        is_done = judging.result() is not None
        blocked += time.perf_counter() - polled
        if is_done:
            break
        time.sleep(POLL_SECONDS)
    whole = time.perf_counter() - began
    judging.close()
    own_cpu, cpu = time.thread_time() - own_cpu, time.process_time() - cpu
    return {"blocked": blocked, "own_cpu": own_cpu, "whole": whole, "cpu": cpu}


def partial_seconds(pool: Pool, prompt: PromptToJudge, count: int, judges: bool) -> list[float]:
    """Return the times of ``count`` partials, 2 ms apart as in a decode step, perhaps while a prompt is judged."""
    ids = prompt.pages[: ATTENDED // PAGE].long().expand(1, 1, -1).contiguous()
    pages, q = PageList(ids, torch.full_like(ids, PAGE)), prompt.layers[0].q[:1]
    judging = NativeJudging(pool, prompt, "a prompt") if judges else None
    seconds = list[float]()
    for _ in range(count):
        if judging is not None and judging.result() is not None:
            judging.close()
            judging = NativeJudging(pool, prompt, "a prompt")
        time.sleep(POLL_SECONDS)
        began = time.perf_counter()
        pool.submit(q, prompt.layers[0].host, *pages, prompt.scale).wait(60)
        seconds.append(time.perf_counter() - began)
    if judging is not None:
        judging.close()
    return seconds


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    prompt, pool = prompt_of(arguments.tokens, arguments.layers), Pool(arguments.threads)
    items = arguments.layers * KV_HEADS
    by_torch, native = list[dict[str, float]](), list[dict[str, float]]()
    partials: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(arguments.rounds):
        began, cpu = time.perf_counter(), time.process_time()
        judged = judging_oracle.judge(prompt)
        by_torch.append({"blocked": time.perf_counter() - began, "cpu": time.process_time() - cpu})
        native.append(in_background(pool, prompt))
        for judges in partials:
            partials[judges] += partial_seconds(pool, prompt, 100, judges)
    pool.close()

    def per_item(seconds: list[float]) -> float:
        return statistics.median(seconds) / items * 1e3

    results: dict[str, Any] = {
        "arguments": vars(arguments),
        "cpu": this_cpu()._asdict(),
        "kept_share": float(judged.keep_mask.float().mean()),
        "milliseconds_per_layer_and_head": {
            "torch": {name: per_item([run[name] for run in by_torch]) for name in by_torch[0]},
            "native": {name: per_item([run[name] for run in native]) for name in native[0]},
        },
        "partial_ms": {
            "judging" if judges else "alone": [1e3 * statistics.quantiles(seconds, n=100)[i] for i in (49, 89, 98)]
            for judges, seconds in partials.items()
        },
    }
    print(json.dumps(results, indent=1))
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "judging.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
