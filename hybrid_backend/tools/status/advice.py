"""Recommended changes: keys as ``--set`` takes them and flags, each with a value that is reckoned from what the server
publishes of its configuration, or with the command that reckons it.

A value is twice or half of what is served, unless what is needed can be counted: one step, after which the page judges
anew. A key whose gauge is not published does nothing for the method that is served, and is not named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybrid_backend.config import MOST_FRAMES, format_size
from hybrid_backend.host_memory import size_text
from hybrid_backend.tools.status.model import Change
from hybrid_backend.tools.status.reading import Reading

MIN_MASS = 0.95
"""The promise that is proposed where there is none; what the page calls good (`faithful.GOOD_MASS`)."""
_LEAST_PAGES = 8
"""Pages of the smallest budget that is proposed: of fewer the first and recent pages, always attended, leave little to
choose."""
_MOST = 2.0
"""Times the host pool, or the requests at once, that is proposed at most."""
_LARGE, _SMALL = 2**30, 64 * 2**20
"""Bytes that a proposed host pool is a multiple of, above and below four of the first."""
_MORE_CORES = "more cores: hybrid plan --machine NAME --what-if cores=N reckons how many"

# What each engine calls the longest context, the most requests at once, and the tokens of a step that reads prompts.
_FLAGS = {
    "vllm": ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
    "sglang": ("--context-length", "--max-running-requests", "--chunked-prefill-size"),
}


def more_faithful(last: Reading) -> Change:
    """Propose a larger budget: too little of the attention mass is kept, and nothing is promised."""
    budget, page, frames = (_value(last, name) for name in ("budget_tokens", "page_tokens", "frames_per_request"))
    if budget is None:
        return Change(problem="Faithfulness", change="sparse=never, by which every token is attended", others=())
    larger = _setting("budget_tokens", 2 * budget, budget)
    # Frames grow with the budget: `infinigen` and `clo` refuse to start with frames that do not hold it.
    if page and frames and 2 * budget / page + 1 > frames:
        larger += f" with {_setting('frames_per_request', frames + budget // page, frames)}"
    promise = f"quality.min_mass={MIN_MASS} with method=scout, by which the server finds the budget"
    return Change(problem="Faithfulness", change=larger, others=(promise,))


def keepable_promise(last: Reading) -> Change | None:
    """Propose a promise that the largest budget keeps, or a larger budget."""
    promised, measured, kl = (_value(last, f"quality_{name}") for name in ("min_mass", "mass", "max_kl"))
    more = _more_frames(last)
    ways = [f"{more}, up to which the budget grows"] if more else []
    if kl:
        ways.append(_larger_kl(kl))
    elif promised and measured and (keepable := math.floor(100 * measured) / 100):
        ways.append(f"{_setting('quality.min_mass', keepable, promised)}, which the largest budget keeps")
    return Change(problem="Promise", change=ways[0], others=tuple(ways[1:])) if ways else None


def more_memory(last: Reading) -> Change:
    """Propose a larger host pool or shorter contexts: requests wait, and the host pool is full."""
    context, at_once, _ = _flags(last)
    size, page, pages = (_value(last, name) for name in ("host_pool_bytes", "page_tokens", "host_pool_pages"))
    if not (size and page and pages and last.running):
        both = f"a larger host_pool.size, or a smaller {context}: hybrid plan reckons both"
        return Change(problem="Host memory", change=both, others=())
    requests = min(last.running + (last.waiting or 0), _MOST * last.running)
    most, more = _value(last, "max_requests"), ""
    if most and last.running >= most * last.replicas:
        more = f", with {at_once} {_more_requests(last, most)} (now {most:.0f})"
    elif most:
        requests = min(requests, most * last.replicas)
    needed = size * requests / last.running
    unit = _LARGE if needed >= 4 * _LARGE else _SMALL
    proposed = format_size(math.ceil(needed / unit) * unit)
    larger = f"host_pool.size={proposed} (now {size_text(round(size))}; or the engine's own setting of it)"
    ways = [f"{larger}, if the machine has it{more}"]
    tokens = int(pages * last.replicas / requests) * page
    taken = (last.pool_fill or 0) * pages * last.replicas * page / last.running
    if tokens and tokens >= taken / 2:  # a shorter context would refuse what is served now
        ways.append(f"{context} {tokens:.0f}, with which {requests:.0f} fit at once{more}")
    return Change(problem="Host memory", change=ways[0], others=tuple(ways[1:]))


def less_copying(last: Reading, budget_may_fall: bool) -> Change:
    """Propose fewer copies: the bus is busy with pages for the frames."""
    interval = _value(last, "recall_interval")
    ways = [_more_frames(last), _setting("recall.intervals", 2 * interval, interval) if interval else ""]
    ways.append(_smaller_budget(last) if budget_may_fall else "")
    return _first_of("The bus", ways, "a faster bus: hybrid plan --machine NAME --what-if pcie=6 reckons one")


def less_waiting(last: Reading, budget_may_fall: bool) -> Change:
    """Propose less work for the CPU workers: the device tier waits for them."""
    interval, threads, cpus = (_value(last, name) for name in ("recall_interval", "worker_threads", "worker_cpus"))
    ways = [_setting("workers.threads", cpus, threads)] if threads and cpus and cpus > threads else []
    ways.append(_more_frames(last))
    if interval and interval > 1:
        ways.append(_setting("recall.intervals", interval // 2, interval))
    if budget_may_fall:
        ways.append(_smaller_budget(last))
    return _first_of("CPU workers", ways, _MORE_CORES)


def larger_batch(last: Reading) -> Change:
    """Propose a larger batch: requests wait although there is room for them."""
    (_, flag, _), most = _flags(last), _value(last, "max_requests")
    if not most:
        return Change(problem="The batch", change=f"a larger {flag}; hybrid plan reckons how many fit", others=())
    proposed = _more_requests(last, most)
    text = f"{flag} {proposed} (now {most:.0f})"
    frames, budget, page = (_value(last, name) for name in ("frames_per_request", "budget_tokens", "page_tokens"))
    if frames and budget and page and _is_on_gpu(last):  # a start lowers the flag to what fits, and says so
        fewer = int(frames * most / proposed)
        if fewer > budget // page:  # methods refuse to start with frames that do not hold the budget
            fitting = _setting("frames_per_request", fewer, frames)
            text += f"; if the log said that no more fit the device, with {fitting}"
    return Change(problem="The batch", change=text, others=())


def shorter_prompt_steps(last: Reading) -> Change:
    """Propose shorter prompt steps: requests decode slowly while prompts are read."""
    _, _, flag = _flags(last)
    text = f"half of {flag} (the start log says what it is), so that tokens come between shorter pieces of prompts"
    shared = "prompts that begin alike, whose beginnings the prefix cache then holds"
    return Change(problem="Prompts", change=text, others=(shared,))


def less_attention(last: Reading, budget_may_fall: bool) -> Change:
    """Propose to attend less: attention in place takes most of the time."""
    ways = []
    if _value(last, "budget_tokens") is None:
        ways.append("method=scout with sparse=auto, which attends budget_tokens=2048 of longer contexts")
    elif budget_may_fall and (smaller := _smaller_budget(last)):
        ways.append(f"{smaller}, as far as it is faithful enough")
    ways.append(_MORE_CORES)
    return _first_of("Attention", ways, _MORE_CORES)


def most_requests(last: Reading) -> float | None:
    """Return how many requests may run at once, in all replicas together."""
    most = _value(last, "max_requests")
    return None if most is None else most * last.replicas


def _more_frames(last: Reading) -> str:
    frames = _value(last, "frames_per_request")
    if not frames or frames >= MOST_FRAMES:
        return ""
    more = min(2 * frames, MOST_FRAMES)
    frame_bytes = last.gauges.get("hybrid_frame_bytes")
    cost = (
        f"; {size_text(round(frame_bytes * (more / frames - 1)))} more on the devices together" if frame_bytes else ""
    )
    if cost and _is_on_gpu(last):  # whose memory is in use already
        cost += f", or none with half the {_flags(last)[1]}"
    return f"frames_per_request={more:.0f} (now {frames:.0f}{cost})"


def _smaller_budget(last: Reading) -> str:
    """Return a smaller budget, or a smaller promise where the budget follows one; empty if none can be proposed."""
    if kl := _value(last, "quality_max_kl"):
        return _larger_kl(kl)
    if (promised := _value(last, "quality_min_mass")) is not None:
        return f"a quality.min_mass below {promised:g}, which the budget follows (hybrid profile says what that costs)"
    budget, page = _value(last, "budget_tokens"), _value(last, "page_tokens")
    if not budget or not page:
        return ""
    pages = budget // page // 2
    return _setting("budget_tokens", pages * page, budget) if pages >= _LEAST_PAGES else ""


def _larger_kl(current: float) -> str:
    return f"{_setting('quality.max_kl', 2 * current, current)}, of which hybrid profile makes a promise"


def _more_requests(last: Reading, most: float) -> int:
    """Return how many requests at once to propose for one replica that runs ``most``."""
    needed = math.ceil(((last.running or 0) + (last.waiting or 0)) / last.replicas)
    return int(min(max(needed, most + 1), _MOST * most))


def _is_on_gpu(last: Reading) -> bool:
    return "hybrid_bus_bytes_per_second" in last.gauges


def _first_of(problem: str, ways: Sequence[str], otherwise: str) -> Change:
    """Propose the first way that is not empty, and name the ways after it as others."""
    possible = [way for way in ways if way] or [otherwise]
    return Change(problem=problem, change=possible[0], others=tuple(possible[1:]))


def _setting(key: str, value: float, current: float) -> str:
    return f"{key}={_plain(value)} (now {_plain(current)})"


def _plain(value: float) -> str:
    """Write a number as a configuration has it."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def _value(last: Reading, name: str) -> float | None:
    return last.gauges.get(f"hybrid_{name}")


def _flags(last: Reading) -> tuple[str, str, str]:
    return _FLAGS.get(last.engine or "", _FLAGS["vllm"])
