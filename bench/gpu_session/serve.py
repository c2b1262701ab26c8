"""``hybrid serve`` over HTTP with trained weights, beside stock vLLM: equal answers where the budget holds the context,
and the distance of next-token distributions beyond it (``hybrid bench accuracy``)."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import httpx

from bench.gpu_session.case import Context
from hybrid_backend.tools.bench.client import BenchError, post
from hybrid_backend.tools.bench.servers import Server, executable, hybrid_server, stock_server
from hybrid_backend.tools.hub import hub_folder, resolve_model


def measure(options: Mapping[str, Any], context: Context) -> None:
    {"equal": equal, "accuracy": accuracy}[options["what"]](options, context)


def equal(options: Mapping[str, Any], context: Context) -> None:
    """Compare greedy answers to prompts that fit the budget, token by token."""
    model = options["model"]
    folder = hub_folder(resolve_model(model))
    prompts = list(texts(folder, options["contexts"]))
    longest = max(options["contexts"]) + options["answer"] + 64
    flags = ["--dtype", options["dtype"], "--max-num-seqs", "8", "--max-model-len", str(longest), *options["flags"]]
    answer = partial(answers, prompts=prompts, tokens=options["answer"], context=context)
    stock = answer("stock", stock_server(context.logs, folder, [*flags, *options["stock_flags"]], model))
    ours = answer("hybrid", hybrid_server(context.logs, {"host_pool.size": options["pool"]}, flags, model))
    same = [sum(a == b for a, b in zip(first, second, strict=False)) for first, second in zip(stock, ours, strict=True)]
    context.emit(
        what="answers as stock's", dtype=options["dtype"], prompts=len(prompts),
        equal=sum(first == second for first, second in zip(stock, ours, strict=True)),
        tokens=sum(map(len, stock)), equal_tokens=sum(same),
    )  # fmt: skip


def texts(folder: str, contexts: Sequence[int]) -> Iterator[list[int]]:
    """Yield prompts of English prose and of source code, one of each length of both."""
    from transformers import AutoTokenizer

    from hybrid_backend.tools.profile.texts import default_texts, windows_of

    encode = partial(AutoTokenizer.from_pretrained(folder).encode, verbose=False)
    for tokens in contexts:
        for window in windows_of(default_texts(), encode, tokens, 1):
            yield list(window.ids)


def answers(
    name: str,
    server: AbstractContextManager[Server],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    context: Context,
) -> list[list[str]]:
    """Return a server's greedy answers as lists of tokens, and emit its start time and counters."""
    began = time.monotonic()
    with server as running:
        start = time.monotonic() - began
        body = {
            "model": running.model, "max_tokens": tokens, "temperature": 0, "logprobs": 0, "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        began = time.monotonic()
        replies = [post(running.url, "/v1/completions", {**body, "prompt": prompt}) for prompt in prompts]
        seconds = time.monotonic() - began
        context.emit(
            what=name, start_seconds=round(start, 1), answers=len(replies), seconds=round(seconds, 2),
            **counters(running.url),
        )  # fmt: skip
    found = [list(reply["choices"][0]["logprobs"]["tokens"]) for reply in replies]
    if any(len(answer) != tokens for answer in found):
        raise BenchError(f"{name}: an answer has not {tokens} tokens")
    return found


def counters(url: str) -> dict[str, float]:
    """Return the sums over layers of the tokens that were selected, and of those that the CPU attended."""
    time.sleep(0.6)  # Metrics are published at most every half second.
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    names = {"selected_tokens": "hybrid_selected_tokens_total", "cpu_tokens": "hybrid_cpu_tokens_total"}
    found = {}
    for key, name in names.items():
        if values := [float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")]:
            found[key] = sum(values)
    return found


def accuracy(options: Mapping[str, Any], context: Context) -> None:
    """Emit the lines of ``hybrid bench accuracy`` as they come."""
    out = context.logs
    command = [
        executable("hybrid"), "bench", "accuracy", "--model", options["model"], "--out", str(out),
        "--context", str(options["context"]), "--samples", str(options["samples"]),
        "--answer", str(options["answer"]), "--dtype", options["dtype"], "--host-pool", str(options["pool"]),
        *(["--budgets", options["budgets"]] if options["budgets"] else []), "--", *options["flags"],
    ]  # fmt: skip
    file, emitted = out / "accuracy.jsonl", 0
    file.unlink(missing_ok=True)

    def emit_new(whole: bool) -> None:
        nonlocal emitted
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        for line in lines[emitted:]:
            if line.endswith("\n") or whole:
                context.emit(what="prompt", **json.loads(line))
                emitted += 1

    with subprocess.Popen(command) as process:
        try:
            while process.poll() is None:
                time.sleep(1)
                emit_new(whole=False)
        finally:
            if process.poll() is None:
                process.terminate()  # It stops its server.
    emit_new(whole=True)
    if process.returncode:
        raise BenchError(f"hybrid bench accuracy ended with {process.returncode}")
    results = [json.loads(line) for line in file.read_text().splitlines()]
    for budget in dict.fromkeys(result["budget"] for result in results):
        own = [result for result in results if result["budget"] == budget]
        means = {key: sum(result[key] for result in own) / len(own) for key in ("kl", "agreement")}
        context.emit(what="mean", budget=budget, prompts=len(own), **means)
