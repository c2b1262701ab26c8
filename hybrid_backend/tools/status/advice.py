"""Recommended changes: configuration keys and flags, each with a value, or with the command that computes one.

A value is computed from the configuration that the server publishes. It is one step, after which the page judges anew:
twice or half of the current value, unless the need can be counted. A key whose gauge is not published does nothing for
the server's method, and is not named.
"""

from __future__ import annotations

import math

from hybrid_backend.config import MOST_FRAMES, format_size
from hybrid_backend.host_memory import size_text
from hybrid_backend.tools.status.model import Change
from hybrid_backend.tools.status.reading import Reading

MIN_MASS = 0.95
"""The attention mass that is proposed as a promise, and from which the page calls a server faithful."""
_LEAST_PAGES = 8
"""Pages of the smallest proposed budget. The first and recent pages, always attended, are most of a smaller budget."""
_GROWTH = 2.0
"""Factor by which the host pool, or the number of requests at once, grows at most."""
_MORE_CORES = "more cores: hybrid plan --machine NAME --cores N reckons how many"
_FASTER_BUS = "a faster bus"
# The flags for the longest context, for the most requests at once, and for the tokens of a step with prompts.
_FLAGS = {
    "vllm": ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
    "sglang": ("--context-length", "--max-running-requests", "--chunked-prefill-size"),
}


def more_faithful(last: Reading) -> Change:
    """Propose a larger budget: too little of the attention mass is kept, and nothing is promised."""
    budget, page, frames = (last.gauge(name) for name in ("budget_tokens", "page_tokens", "frames_per_request"))
    if budget is None:
        return Change("Faithfulness", "sparse=never, by which every token is attended")
    larger = _setting("budget_tokens", 2 * budget, budget)
    # `infinigen` and `clo` refuse to start with frames that do not hold the budget.
    if page and frames and 2 * budget / page + 1 > frames:
        larger += f" with {_setting('frames_per_request', frames + budget // page, frames)}"
    promise = f"quality.min_mass={MIN_MASS} with method=scout, by which the server finds the budget"
    return Change("Faithfulness", larger, (promise,))


def keepable_promise(last: Reading) -> Change | None:
    """Propose a promise that the largest budget keeps, or a larger budget."""
    promised, measured, kl = (last.gauge(f"quality_{name}") for name in ("min_mass", "mass", "max_kl"))
    more = _more_frames(last)
    ways = [f"{more}, up to which the budget grows"] if more else []
    if kl:
        ways.append(_larger_kl(kl))
    elif promised and measured and (keepable := math.floor(100 * measured) / 100):
        ways.append(f"{_setting('quality.min_mass', keepable, promised)}, which the largest budget keeps")
    return _first("Promise", *ways) if ways else None


def more_memory(last: Reading) -> Change:
    """Propose a larger host pool or shorter contexts: requests wait, and the host pool is full."""
    context, at_once, _ = _flags(last)
    size, page, pages = (last.gauge(name) for name in ("host_pool_bytes", "page_tokens", "host_pool_pages"))
    if not (size and page and pages and last.running):
        return _first("Host memory", f"a larger host_pool.size, or a smaller {context}: hybrid plan reckons both")
    requests = min(last.running + (last.waiting or 0), _GROWTH * last.running)
    most, flag = last.gauge("max_requests"), ""
    if most and last.running >= most * last.replicas:
        flag = f", with {at_once} {_more_requests(last, most)} (now {most:.0f})"
    elif most:
        requests = min(requests, most * last.replicas)
    needed = size * requests / last.running
    unit = 2**30 if needed >= 4 * 2**30 else 64 * 2**20
    proposed = format_size(math.ceil(needed / unit) * unit)
    pool = f"host_pool.size={proposed} (now {size_text(round(size))}; or the engine's own setting of it)"
    tokens = int(pages * last.replicas / requests) * page
    used = (last.pool_fill or 0) * pages * last.replicas * page / last.running
    # A context of less than half of what a request uses would refuse requests that are served today.
    is_enough = tokens and tokens >= used / 2
    shorter = f"{context} {tokens:.0f}, with which {requests:.0f} fit at once{flag}" if is_enough else ""
    return _first("Host memory", f"{pool}, if the machine has it{flag}", shorter)


def less_copying(last: Reading, can_lower_budget: bool) -> Change:
    """Propose fewer copies: the bus is busy with pages for the frames."""
    interval = last.gauge("recall_interval")
    rarer = _setting("recall.intervals", 2 * interval, interval) if interval else ""
    return _first("The bus", _more_frames(last), rarer, _smaller_budget(last, can_lower_budget), _FASTER_BUS)


def less_waiting(last: Reading, can_lower_budget: bool) -> Change:
    """Propose less work for the CPU workers: the device tier waits for them."""
    interval, threads, cpus = (last.gauge(name) for name in ("recall_interval", "worker_threads", "worker_cpus"))
    more_threads = _setting("workers.threads", cpus, threads) if threads and cpus and cpus > threads else ""
    sooner = _setting("recall.intervals", interval // 2, interval) if interval and interval > 1 else ""
    smaller = _smaller_budget(last, can_lower_budget)
    return _first("CPU workers", more_threads, _more_frames(last), sooner, smaller, _MORE_CORES)


def larger_batch(last: Reading) -> Change:
    """Propose a larger batch: requests wait although there is room for them."""
    (_, flag, _), most = _flags(last), last.gauge("max_requests")
    if not most:
        return _first("The batch", f"a larger {flag}; hybrid plan reckons how many fit")
    proposed = _more_requests(last, most)
    text = f"{flag} {proposed} (now {most:.0f})"
    frames, budget, page = (last.gauge(name) for name in ("frames_per_request", "budget_tokens", "page_tokens"))
    # On a GPU the start lowers the flag to what fits the device's memory. Frames must still hold the budget.
    if frames and budget and page and _is_on_gpu(last) and (fewer := int(frames * most / proposed)) > budget // page:
        fitting = _setting("frames_per_request", fewer, frames)
        text += f"; if the log said that no more fit the device, with {fitting}"
    return _first("The batch", text)


def shorter_prompt_steps(last: Reading) -> Change:
    """Propose shorter prefill chunks: requests decode slowly while prompts are read."""
    _, _, flag = _flags(last)
    text = f"half of {flag} (the start log says what it is), so that tokens come between shorter pieces of prompts"
    return _first("Prompts", text, "prompts that begin alike, whose beginnings the prefix cache then holds")


def less_attention(last: Reading, can_lower_budget: bool) -> Change:
    """Propose to attend less: attention in place takes most of the time."""
    smaller = _smaller_budget(last, can_lower_budget)
    way = f"{smaller}, as far as it is faithful enough" if smaller else ""
    if last.gauge("budget_tokens") is None:
        way = "method=scout with sparse=auto, which attends budget_tokens=2048 of longer contexts"
    return _first("Attention", way, _MORE_CORES)


def most_requests(last: Reading) -> float | None:
    """Return how many requests may run at once, in all replicas together."""
    most = last.gauge("max_requests")
    return None if most is None else most * last.replicas


def _more_frames(last: Reading) -> str:
    frames, frame_bytes = last.gauge("frames_per_request"), last.gauge("frame_bytes")
    if not frames or frames >= MOST_FRAMES:
        return ""
    more, memory = min(2 * frames, MOST_FRAMES), ""
    if frame_bytes:
        memory = f"; {size_text(round(frame_bytes * (more / frames - 1)))} more on the devices together"
        memory += f", or none with half the {_flags(last)[1]}" if _is_on_gpu(last) else ""
    return f"frames_per_request={more:.0f} (now {frames:.0f}{memory})"


def _smaller_budget(last: Reading, can_lower_budget: bool) -> str:
    """Return a smaller budget, or a smaller promise if the budget follows one; empty if none can be proposed."""
    if not can_lower_budget:
        return ""
    if kl := last.gauge("quality_max_kl"):
        return _larger_kl(kl)
    if (promised := last.gauge("quality_min_mass")) is not None:
        return f"a quality.min_mass below {promised:g}, which the budget follows (hybrid profile says what that costs)"
    budget, page = last.gauge("budget_tokens"), last.gauge("page_tokens")
    pages = budget // page // 2 if budget and page else 0
    return _setting("budget_tokens", pages * page, budget) if budget and page and pages >= _LEAST_PAGES else ""


def _larger_kl(current: float) -> str:
    return f"{_setting('quality.max_kl', 2 * current, current)}, of which hybrid profile makes a promise"


def _more_requests(last: Reading, most: float) -> int:
    """Return the proposed number of requests at once of one replica that runs ``most``."""
    needed = math.ceil(((last.running or 0) + (last.waiting or 0)) / last.replicas)
    return int(min(max(needed, most + 1), _GROWTH * most))


def _is_on_gpu(last: Reading) -> bool:
    return last.gauge("bus_bytes_per_second") is not None


def _first(problem: str, *ways: str) -> Change:
    """Propose the first way that is not empty, and name the ways after it as others."""
    first, *others = filter(None, ways)
    return Change(problem, first, tuple(others))


def _setting(key: str, value: float, current: float) -> str:
    """Write a key with its proposed and its current value, whole numbers without a point."""
    return f"{key}={value:.12g} (now {current:.12g})"


def _flags(last: Reading) -> tuple[str, str, str]:
    return _FLAGS.get(last.engine or "", _FLAGS["vllm"])
