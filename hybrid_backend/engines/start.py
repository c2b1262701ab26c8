"""Lines of the log that say, once per server, what serves: printed when the runtime is up."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch

from hybrid_backend.host_memory import size_text
from hybrid_backend.in_place.step import InPlaceStep
from hybrid_backend.kernels import cpu
from hybrid_backend.methods import why_scout
from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step.operations import operations_name
from hybrid_backend.workers import kernel_name


def start_lines(runtime: HybridRuntime, groups: int = 1) -> Iterator[tuple[int, str]]:
    """Yield levels of `logging` and lines: what the server runs with, and a warning if native kernels are missing.

    Args:
        runtime: the runtime of one rank.
        groups: KV cache groups that share the pages of the host pool.
    """
    config, host = runtime.config, runtime.tiers.host
    digests = runtime.tiers.layout.digests
    tokens = runtime.pages // groups * config.page_size
    encoding = " in 8 bits" if runtime.model.kv_dtype is torch.int8 else ""
    no_library, no_quest = cpu.why_unavailable(), why_scout(config, runtime.model, runtime.tiers.device)
    method = f"{config.method} (quest cannot serve: {no_quest})" if no_quest not in ("", no_library) else config.method
    yield (
        logging.INFO,
        f"hybrid backend: method {method}, host pool {size_text(host.nbytes)} ({tokens:,} tokens{encoding}), "
        f"{_attended(runtime)}, "
        f"digests {'none' if digests is None else digests.name}, kernels {_kernels(runtime)}, {_threads(runtime)}",
    )
    if config.workers.kernel == "auto" and no_library is not None:
        yield logging.WARNING, f"PyTorch attends instead of native CPU kernels, several times slower: {no_library}"


def _attended(runtime: HybridRuntime) -> str:
    """Say how much of a context a decode step attends: everything, or a budget, and which contexts are exact."""
    exact = runtime.method.exact_tokens(runtime.config)
    if math.isinf(exact):
        return "every token attended"
    budget = runtime.method.gauges().get("hybrid_budget_tokens")
    text = "part of a long context attended" if budget is None else f"budget {budget:,.0f} tokens"
    return f"{text} (exact up to {exact:,.0f} tokens)" if exact else text


def _threads(runtime: HybridRuntime) -> str:
    """Say how many threads attend: in place the engine's threads, with separate tiers the CPU workers."""
    if isinstance(runtime.executor, InPlaceStep):
        return f"in place on {torch.get_num_threads()} threads"
    return f"{runtime.workers.threads} worker threads"


def _kernels(runtime: HybridRuntime) -> str:
    """Name the kernels of the CPU workers, and those of the device tier if they differ."""
    workers = kernel_name(runtime.config.workers.kernel)
    device = operations_name(runtime.config, runtime.tiers.device)
    text = f"{workers} ({cpu.isas()[0]})" if workers == "native" else workers
    return text if device == workers else f"{text}, {device} on the device tier"
