"""What to change: keys as ``--set`` takes them and flags, each with a value that is reckoned from what the server
publishes of its configuration, or with the command that reckons it.

A value is twice or half of what is served now, unless what is needed can be counted: one step, after which the page
judges anew. A key whose gauge is not there does nothing for the method that is served, and is not named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybrid_backend.config import MOST_FRAMES, format_size
from hybrid_backend.host_memory import size_text
from hybrid_backend.tools.status.reading import Reading

MIN_MASS = 0.95
"""The promise that is proposed where there is none; what the page calls good (`glance.KEPT_WELL`)."""
_LEAST_PAGES = 8
"""Of a budget that is proposed: of fewer the first and recent pages, always attended, leave little to choose."""
_MOST = 2.0
"""Times the host pool, or the requests at once, that is proposed at most."""
_LARGE, _SMALL = 2**30, 64 * 2**20
"""Bytes that a proposed host pool is a multiple of, above and below four of the first."""
_MORE_CORES = "more cores: hybrid plan --machine NAME --what-if cores=N reckons how many"

# What each engine calls the longest context, and the most requests at once.
_FLAGS = {"vllm": ("--max-model-len", "--max-num-seqs"), "sglang": ("--context-length", "--max-running-requests")}


def more_faithful(last: Reading) -> str:
    """Too little of the attention mass is kept, and nothing is promised."""
    budget, page, frames = (_value(last, name) for name in ("budget_tokens", "page_tokens", "frames_per_request"))
    if budget is None:
        return "Faithful: sparse=never, by which everything is attended."
    text = f"Faithful: {_now('budget_tokens', 2 * budget, budget)}"
    # Frames grow by what the budget does: `infinigen` and `clo` refuse to start where they do not hold it.
    if page and frames and 2 * budget / page + 1 > frames:
        text += f" with {_now('frames_per_request', frames + budget // page, frames)}"
    return f"{text}; or, with method=scout, quality.min_mass={MIN_MASS}, by which the server finds the budget."


def keepable_promise(last: Reading) -> str:
    """The largest budget does not keep what is promised."""
    promised, kept, kl = (_value(last, f"quality_{name}") for name in ("min_mass", "mass", "max_kl"))
    wider = _more_frames(last)
    parts = [f"{wider}, up to which the budget grows"] if wider else []
    if kl:
        parts.append(_larger_kl(kl))
    elif promised and kept and (keepable := math.floor(100 * kept) / 100):
        parts.append(f"{_now('quality.min_mass', keepable, promised)}, which the largest budget keeps")
    return f"Promise: {'; or '.join(parts)}." if parts else ""


def more_memory(last: Reading) -> str:
    """Requests wait, and the host pool is full."""
    flag, at_once = _flags(last)
    size, page, pages = (_value(last, name) for name in ("host_pool_bytes", "page_tokens", "host_pool_pages"))
    if not (size and page and pages and last.running):
        return f"Memory: a larger host_pool.size, or a smaller {flag}: hybrid plan reckons both."
    wanted = min(last.running + (last.waiting or 0), _MOST * last.running)
    most, more = _value(last, "max_requests"), ""
    if most and last.running >= most * last.replicas:
        more = f"; with {at_once} {_more_requests(last, most)} (now {most:.0f})"
    elif most:
        wanted = min(wanted, most * last.replicas)
    needed = size * wanted / last.running
    unit = _LARGE if needed >= 4 * _LARGE else _SMALL
    proposed = format_size(math.ceil(needed / unit) * unit)
    text = f"Memory: host_pool.size={proposed} (now {size_text(round(size))}; or the engine's own setting of it)"
    text += ", if the machine has it"
    tokens = int(pages * last.replicas / wanted) * page
    taken = (last.pool_fill or 0) * pages * last.replicas * page / last.running
    if tokens and tokens >= taken / 2:  # less would refuse what is served now
        text += f"; or {flag} {tokens:.0f}, with which {wanted:.0f} fit at once"
    return f"{text}{more}."


def less_copying(last: Reading, budget_may_fall: bool) -> str:
    """The bus is busy with pages for the frames."""
    interval = _value(last, "recall_interval")
    parts = [_more_frames(last), _now("recall.intervals", 2 * interval, interval) if interval else ""]
    parts.append(_smaller_budget(last) if budget_may_fall else "")
    return _any_of("Bus", parts, "a faster bus: hybrid plan --machine NAME --what-if pcie=6 reckons one")


def less_waiting(last: Reading, budget_may_fall: bool) -> str:
    """The device tier waits for the CPU workers."""
    interval, threads, cpus = (_value(last, name) for name in ("recall_interval", "worker_threads", "worker_cpus"))
    parts = [_more_frames(last)]
    if interval and interval > 1:
        parts.append(_now("recall.intervals", interval // 2, interval))
    if budget_may_fall:
        parts.append(_smaller_budget(last))
    if threads and cpus and cpus > threads:
        parts.append(_now("workers.threads", cpus, threads))
    return _any_of("CPU", parts, _MORE_CORES)


def larger_batch(last: Reading) -> str:
    """Requests wait although there is room for them."""
    (_, flag), most = _flags(last), _value(last, "max_requests")
    if not most:
        return f"Batch: a larger {flag}; hybrid plan reckons how many fit."
    proposed = _more_requests(last, most)
    text = f"Batch: {flag} {proposed} (now {most:.0f})"
    frames, budget, page = (_value(last, name) for name in ("frames_per_request", "budget_tokens", "page_tokens"))
    if frames and budget and page and _is_on_gpu(last):  # a start lowers the flag to what fits, and says so
        fewer = int(frames * most / proposed)
        if fewer > budget // page:  # methods refuse to start with frames that do not hold the budget
            fitting = _now("frames_per_request", fewer, frames)
            text += f"; if the log said that no more fit the device, with {fitting}"
    return f"{text}."


def less_attention(last: Reading, budget_may_fall: bool) -> str:
    """Attention in place takes most of the time."""
    parts = [_MORE_CORES]
    if _value(last, "budget_tokens") is None:
        parts.insert(0, "method=scout with sparse=auto, which attends budget_tokens=2048 of longer contexts")
    elif budget_may_fall and (smaller := _smaller_budget(last)):
        parts.insert(0, f"{smaller}, as far as it is faithful enough")
    return f"Attention: {'; or '.join(parts)}."


def most_requests(last: Reading) -> float | None:
    """That may run at once, of all replicas."""
    most = _value(last, "max_requests")
    return None if most is None else most * last.replicas


def _more_frames(last: Reading) -> str:
    frames = _value(last, "frames_per_request")
    if not frames or frames >= MOST_FRAMES:
        return ""
    more = min(2 * frames, MOST_FRAMES)
    held = last.gauges.get("hybrid_frame_bytes")
    cost = f"; {size_text(round(held * (more / frames - 1)))} more on the devices together" if held else ""
    if cost and _is_on_gpu(last):  # whose memory is in use already
        cost += f", or none with half the {_flags(last)[1]}"
    return f"frames_per_request={more:.0f} (now {frames:.0f}{cost})"


def _smaller_budget(last: Reading) -> str:
    """Empty: there is none that could be proposed."""
    if kl := _value(last, "quality_max_kl"):
        return _larger_kl(kl)
    if (promised := _value(last, "quality_min_mass")) is not None:
        return f"a quality.min_mass below {promised:g}, which the budget follows (hybrid profile says what that costs)"
    budget, page = _value(last, "budget_tokens"), _value(last, "page_tokens")
    if not budget or not page:
        return ""
    pages = budget // page // 2
    return _now("budget_tokens", pages * page, budget) if pages >= _LEAST_PAGES else ""


def _larger_kl(now: float) -> str:
    return f"{_now('quality.max_kl', 2 * now, now)}, of which hybrid profile makes a promise"


def _more_requests(last: Reading, most: float) -> int:
    """At once, of one replica that runs ``most``."""
    wanted = math.ceil(((last.running or 0) + (last.waiting or 0)) / last.replicas)
    return int(min(max(wanted, most + 1), _MOST * most))


def _is_on_gpu(last: Reading) -> bool:
    return "hybrid_bus_bytes_per_second" in last.gauges


def _any_of(name: str, parts: Sequence[str], otherwise: str) -> str:
    found = [part for part in parts if part]
    return f"{name}: {'; or '.join(found) if found else otherwise}."


def _now(key: str, value: float, now: float) -> str:
    return f"{key}={_plain(value)} (now {_plain(now)})"


def _plain(value: float) -> str:
    """As it is written in a configuration."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def _value(last: Reading, name: str) -> float | None:
    return last.gauges.get(f"hybrid_{name}")


def _flags(last: Reading) -> tuple[str, str]:
    return _FLAGS.get(last.engine or "", _FLAGS["vllm"])
